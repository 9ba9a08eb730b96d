"""Files and folders written whole or not at all, and folders of models checked before they are loaded.

Knows no run, no torch and no network but for names of models on the Hub. May import ``errors``.
"""
