"""Groups of episodes in child processes, for agents that need more than one core.

Promises that a worker that dies fails its own groups only, and that nothing it sends is unpickled. The run's process
keeps all that must be one: gate, version, data source, dumps, servers. May import ``rollout.episodes``, ``processes``
and what is below; called by ``rollout.engine_lifecycle``. Read worker_pool (all workers), worker (one, seen from the
run), worker_process (its process), messages (what both send).
"""
