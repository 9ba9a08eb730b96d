"""Config to objects to run: the only room that sees rollout and trainer.

Promises that bad input is refused before anything starts, that a run resumes exactly, and that it leaves nothing
running. May import all but ``tools`` and ``cli``, which call it. Read rl_run (the loop), training_run (the work around
its steps), rollout_driver (its batches), run_data and engine_stack (what a run is made of); entry_points,
supervised_run and rollouts_alone start runs.
"""
