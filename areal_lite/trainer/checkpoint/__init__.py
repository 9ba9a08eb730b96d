"""Checkpoints that are complete or absent, written beside training. Read checkpoint, then snapshot."""
