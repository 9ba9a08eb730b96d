"""Rows in, training samples out."""
