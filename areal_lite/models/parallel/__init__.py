"""The processes that train one model together: sums and broadcasts, shards of weights, parts of sequences and layers.

Promises that ranks decide alike, a dead rank fails the others, and nothing is pickled. May import ``data`` and ``api``;
called by ``trainer``, ``runs`` and ``servers.weights``. Read ranks, sharding, sequence_parallel, tensor_parallel.
"""
