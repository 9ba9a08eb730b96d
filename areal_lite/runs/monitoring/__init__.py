"""Metrics and profiles of a run."""
