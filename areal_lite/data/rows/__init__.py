"""Rows of a dataset: read, checked, filtered, ordered, loaded in batches.

Promises that rows of files stay on disk and that a damaged one is an error with its place. Read load_rows (sources;
row_files and text_rows read files), prompt_rows (the rows of a run, without prompts that are too long; rows that grow);
rl_dataset, with tensors, and loader are for own loops and supervised runs. Imports ``config``, ``files`` and
``data.chat``; called by ``data.source``, ``data.supervised`` and ``runs``.
"""
