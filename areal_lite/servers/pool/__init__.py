"""The set of servers: which one takes a request, which requests wait, and what brings each to the wanted state.

Promises that a server gets requests only while it answers and has the newest weights. Imports weights, and from client
what it asks servers; called by client. Read server_pool (pure bookkeeping), request_gate (waiting requests), then
reconciler (probes, repairs, weight updates) and sglang_router.
"""
