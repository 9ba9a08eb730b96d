"""The ways in which new weights reach the servers: a folder, shared memory, a broadcast, an adapter.

Promises that no server ever serves half a version. Only modules that hold tensors load torch; called by ``runs``,
``embedded`` and pool. Read published_weights (the records that are handed over), then the three sides: publisher,
weight_folder, shared_memory and broadcaster run beside the trainer; weight_loader and broadcast_loader run in the
engine client, and have each server load what was published. The embedded server's side is its weight_routes.
"""
