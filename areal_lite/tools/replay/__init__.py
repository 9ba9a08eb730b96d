"""Runs again from their folder: ``replay`` trains the recorded batches, ``continue`` branches an episode.

Promises that the run's folder is only read and that nothing of its config is imported without ``--trust-config``. Read
dump_reader and replay; then branching_workflow and continue_episode. ``verify`` uses dump_reader too.
"""
