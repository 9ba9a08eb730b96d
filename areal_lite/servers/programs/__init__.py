"""Server processes that a run starts: the embedded server, SGLang, vLLM and the router in front of them.

Promises that settings are checked before a process starts, and that servers end with the run. Imports dialects, for
the first request to a server; called by ``runs``, ``embedded`` and ``tools``. Read server_group, server_process (one
server from its start to its end), then server_program.
"""
