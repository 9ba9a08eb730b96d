"""The composition root: from a config to objects to a run. The only layer that sees all others."""
