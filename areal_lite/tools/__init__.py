"""Commands that look, check and prove: nothing that trains imports them.

Each folder is one command or a family of them. May import everything but ``cli``, which calls them.
"""
