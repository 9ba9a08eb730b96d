"""Dataset rows: where they are read or made, and the order they come in."""
