"""The command ``areal-lite``: the list of commands, signals and exit codes.

Promises that ``areal-lite --help`` loads no command. A command's arguments and its function stand beside its feature,
in ``tools``. May import everything; only ``__main__`` imports it. Read commands, main, stop_signals.
"""
