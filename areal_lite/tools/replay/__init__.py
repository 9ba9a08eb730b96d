"""Runs again from their folder: ``replay`` trains the recorded batches, ``continue`` branches an episode."""
