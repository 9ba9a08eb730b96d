"""AReaL's names: import paths that its workflow files use, and what replaces the rest.

Promises that a workflow or agent file of AReaL runs after ``areal`` became ``areal_lite`` in its imports, and that a
name which does not exist here is an error that says what replaces it. Nothing imports this room but the import hook of
the package; it may import what it names. Read areal.toml, then names; the others are what only AReaL's files need.
"""
