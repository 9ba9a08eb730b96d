"""Training batches at the edges: verl's DataProto, its files, and the partition of sequences among ranks.

Promises that columns stay aligned and that nothing is pickled. A run trains on groups; a DataProto appears for the
user's own packers, cached batches, curricula and other ranks. Read data_proto (the columns), training_batch (their
keys, and groups to columns and back), data_proto_file; collate is for own loops. Imports ``api`` and ``data.rows``;
called by ``data.packer``, ``models.parallel``, ``trainer.rl`` and ``runs``.
"""
