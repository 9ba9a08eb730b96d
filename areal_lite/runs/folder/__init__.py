"""The folder of a run: made, found again to resume, and the batches that were trained from it."""
