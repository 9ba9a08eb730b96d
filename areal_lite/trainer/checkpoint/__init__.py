"""Checkpoints that are complete or absent, written beside training.

Promises that a run resumes bit for bit, and that a damaged checkpoint is an error and never skipped. May import
``learner``, ``models`` and ``files``; called by ``runs``. Read checkpoint (the folders), then snapshot (their content).
"""
