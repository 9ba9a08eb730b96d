"""The command ``areal-lite``: arguments, signals, exit codes. Each command is a function of another room."""
