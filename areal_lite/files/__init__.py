"""Files and folders written whole or not at all, folders of models checked before they are loaded, and files of others
opened safely.

Knows no run, no torch and no network but for names of models on the Hub. May import ``errors``.
"""
