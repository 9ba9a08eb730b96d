"""Which servers there are, which one takes a request, and what brings each to the wanted state.

Read server_pool (pure bookkeeping), then reconciler (probes, pauses, weights) and sglang_router.
"""
