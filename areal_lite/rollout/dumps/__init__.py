"""Every ended group as JSON lines, written off the event loop.

Promises that a file is whole or absent, that a slow disk holds back new groups and not the event loop, and that a group
which the disk did not take is an error. May import ``processes``, ``config``, ``data.chat`` and ``api``; called by
``rollout.engine_lifecycle``. Read trajectory_dumper (the run's side), packed_group (what it sends), dump_writer (the
process) and dump_lines (the format, which ``tools.replay.dump_reader`` reads back).
"""
