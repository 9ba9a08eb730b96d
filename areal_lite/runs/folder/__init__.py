"""The folder of a run: made, locked, written to, and found again to resume.

Promises that one process at a time writes a run's folder, that no run mixes its records with another's, and that a run
resumes from its newest checkpoint or not at all. Called by ``runs`` and ``tools``. Read run_directory, then resuming.
"""
