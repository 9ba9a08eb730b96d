"""``areal-lite plan``: time, memory and disk of a run, measured on a few of its steps."""
