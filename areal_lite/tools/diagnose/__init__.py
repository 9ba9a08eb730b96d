"""Why a reward does not rise: findings from what a run left, each with its figure, meaning and the key to change.

Promises that a run's folder is only read, as data. ``inspect --diagnose`` and ``view`` show the findings. Read episodes
(what is read), then checks.toml (what is judged, with the reason of each limit) and findings (how).
"""
