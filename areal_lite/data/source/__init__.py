"""Data sources of rollouts: rows as groups of samples, with a position that can be saved and resumed."""
