"""Config to objects to run: the only room that sees rollout and trainer.

Promises that bad input is refused before a start, and that a run resumes exactly and leaves nothing running. May import
all but ``tools`` and ``cli``, which call it. Read rl_run (the loop), training_run (the work around its steps),
rollout_driver (its batches), run_data and engine_stack (its parts), entry_points and supervised_run (starts).
"""
