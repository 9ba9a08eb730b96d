"""The folder of a run: made, locked, written to, and found again to resume."""
