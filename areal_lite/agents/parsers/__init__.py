"""Tool calls and reasoning in a model's text, by the format that its chat template uses."""
