"""The programs of a run on the nodes of a Ray cluster; loaded only where ``launch`` is ray.

Promises that a program is started, watched and ended as on this machine (``processes.place``), that it ends with the
run, and that only placing and supervising goes through Ray: batches, model calls and weights take the channels of a run
on one machine. May import ``config``, ``processes`` and what is below; ``runs`` and ``tools`` find it by its path. Read
ray_places (bundles, and what nodes must have), ray_session (which cluster), remote_program (one program, seen from the
run), node_actor (the same on its node); ``tools.run.on_nodes`` has trainer ranks and the runs of a sweep.
"""
