"""The commands that run a config: ``train``, ``rollout``, ``eval``, those of supervised training, and ``config``.

Each file adds its command's arguments, runs it, and prints the result and the command to go on with. Read train, then
config, which has the arguments of every command that reads one.
"""
