"""The rollout engine: admission, episodes, requests, dumps. Knows nothing of trainers or agents."""
