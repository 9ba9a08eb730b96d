"""Dataset rows: reading or generating them, and their order."""
