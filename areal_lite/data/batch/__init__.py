"""Training batches: verl's DataProto, its file format, and plans that cut a batch into mini-batches."""
