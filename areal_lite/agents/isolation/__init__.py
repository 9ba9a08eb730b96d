"""An agent's code away from the event loop: in a thread, in a process of its own, and programs that it starts.

Read agent_access (what an agent gets), then agent_thread and agent_processes.
"""
