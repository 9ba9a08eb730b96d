"""Groups of episodes in child processes, for agents that need more than one core.

The run's process keeps all that must be one: gate, version, data source, dumps, servers. Read worker_pool, worker,
worker_process, messages.
"""
