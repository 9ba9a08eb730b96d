"""The processes that train one model together: their sums and broadcasts, and shards of the weights.

Promises that all ranks decide alike, that a dead rank fails the others, and that nothing is pickled. May import
``data`` and ``api``; called by ``trainer``, ``runs`` and ``servers.weights``. Read ranks, then sharding.
"""
