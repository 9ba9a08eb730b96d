"""Server processes that a run starts: the embedded server, SGLang, vLLM and the router in front of them.

Promises that settings are checked before a process starts, and that servers end with the run. Read server_group.
"""
