"""An agent's code away from the event loop: in a thread, in a process of its own, and programs that it starts.

Promises that none of it outlives its episode, except a thread that does not end, which is logged and counted. Imports
api, processes (call pool, child processes) and the HTTP client of doors. ``agent_workflow`` calls it. Read agent_access
(what an agent gets and may run), then agent_thread, agent_processes and episode_processes (what it starts itself).
"""
