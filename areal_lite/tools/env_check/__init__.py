"""``areal-lite env-check``: what is wrong with an environment, found by playing it without a model.

Promises that a defect is found by the check that names it, with a fix, and that a check which cannot run says so.
Imports environments, and runs where a model plays; only ``cli`` calls it. Read play, conduct, credit, command.
"""
