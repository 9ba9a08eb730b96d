"""The commands that run a config: ``train``, ``rollout``, ``eval``, and those of supervised training.

Each file adds its command's arguments, runs it, and prints the result and the command to go on with. May import the
rest of ``runs``; ``cli`` and the tools that train call it. Read train.
"""
