"""Starts projects from templates: areal-lite init."""
