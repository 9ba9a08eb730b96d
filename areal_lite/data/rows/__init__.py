"""Rows of a dataset: read, checked, ordered, loaded in batches. Read load_rows, then rl_dataset."""
