"""Tokenized answers and preference pairs for supervised runs."""
