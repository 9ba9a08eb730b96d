"""The set of servers: which one takes a request, which requests wait, and what brings each to the wanted state.

Read server_pool (pure bookkeeping), request_gate (waiting requests), then reconciler (probes, repairs, weight updates)
and sglang_router.
"""
