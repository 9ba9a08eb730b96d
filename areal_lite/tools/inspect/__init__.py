"""``areal-lite inspect``, ``rescore`` and ``plot``: dumped episodes found, shown, scored again; metrics drawn.

Promises that the dumps are only read, and that a line which cannot be read is a finding, never an exception.
``export``, ``view``, ``verify`` and ``replay`` use it. Read dumps and run_dumps, then filters and dump_index.
"""
