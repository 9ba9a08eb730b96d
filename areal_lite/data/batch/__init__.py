"""Training batches at the edges: verl's DataProto, its files, and the partition of sequences among ranks."""
