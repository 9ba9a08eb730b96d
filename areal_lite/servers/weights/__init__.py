"""How new weights reach the servers: as a folder, in shared memory, as a broadcast, as an adapter.

Promises that no server ever loads half a version. Read published_weights (what is handed over), publisher (how a run
chooses), then weight_folder, shared_memory and broadcaster; receiver and broadcast_update are the servers' side. Only
the modules that hold tensors load torch.
"""
