"""Sequences packed into micro-batches, and the log-probs, values and scores of a model on them.

Promises that neither packing nor order nor the number of ranks changes a result. May import ``models``; called by
``rl/``, ``supervised/`` and ``runs``. Read microbatches (plans), packed_model, then logprobs and scalar_model.
"""
