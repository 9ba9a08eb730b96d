"""Sequences packed into micro-batches, and the log-probs, values and scores of a model on them.

Promises that neither packing nor order nor the number of ranks changes a result. Read microbatches, then packed_model.
"""
