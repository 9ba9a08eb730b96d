"""Config to objects to run: the only room that sees rollout and trainer.

Promises that bad input is refused before anything starts, that a run resumes exactly, and that it leaves nothing
running. Read rl_run (the algorithm), training_run (the work around its steps) and rollout_driver. May import all but
``tools`` and ``cli``, which call it.
"""
