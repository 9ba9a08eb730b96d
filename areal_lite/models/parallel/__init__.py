"""The processes that train one model together: their sums and broadcasts, shards of weights, parts of sequences.

Promises that all ranks decide alike, that a dead rank fails the others, and that nothing is pickled. May import
``data`` and ``api``; called by ``trainer``, ``runs`` and ``servers.weights``. Read ranks, then sharding,
shard_loading and sequence_parallel.
"""
