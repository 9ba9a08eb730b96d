"""AReaL's names: import paths that its workflow files use, and what replaces the rest.

import_paths has the table; the other modules are what areal_lite itself has no need for. Nothing imports this room but
the import hook of the package.
"""
