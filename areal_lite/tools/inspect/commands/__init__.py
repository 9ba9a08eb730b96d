"""The commands on dumped episodes and metrics: ``inspect``, ``rescore`` and ``plot``.

Each file adds its command's arguments and calls the module of ``tools/inspect`` that does the work, which is imported
only then. Called by ``cli`` alone.
"""
