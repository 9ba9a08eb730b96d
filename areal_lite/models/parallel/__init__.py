"""The processes that train one model together: sums and broadcasts, shards of weights, parts of sequences and layers.

Promises that all ranks decide alike, that a dead rank fails the others, and that nothing is pickled. May import
``data`` and ``api``; called by ``trainer``, ``runs`` and ``servers.weights``. Read ranks, then sharding,
sequence_parallel and tensor_parallel.
"""
