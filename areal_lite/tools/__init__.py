"""Commands: those that run a config, and those that look, check and prove. Nothing that a run needs imports them.

Each folder is one command or a family of them. May import everything but ``cli``, which calls them.
"""
