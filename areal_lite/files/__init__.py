"""Files and folders written whole or not at all, models checked before they are loaded, and text of others made safe.

Promises that a file or folder under its final name is complete, and that a model which cannot be had is an error within
seconds. Knows no run, no torch, and no network but for names on the Hub. May import ``errors``; called by every room
that writes files or takes a ``model_path``. Read atomic_folder, whole_files, model_path.
"""
