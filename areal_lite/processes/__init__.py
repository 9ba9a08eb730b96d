"""Child processes that never outlive their parent, and the one way to talk with them.

Promises that a child ends with the process that started it, however that ends, and that nothing a child sends is
unpickled in the run. Also what HTTP servers in this process refuse: browser_guard, http_limits. May import ``errors``
and ``files``; called by every room that starts something. Read child_process, channel, call_pool, sandbox.
"""
