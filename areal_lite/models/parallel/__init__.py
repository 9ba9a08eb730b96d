"""The processes that train one model together: their sums and broadcasts, and shards of the weights."""
