"""Metrics of a run, progress on the console, profiles."""
