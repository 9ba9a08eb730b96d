"""``areal-lite doctor`` and ``--dry-run``: checks whether this machine, model and config are able to run.

Promises that nothing changes but a temporary folder, and that each finding says value, rule and fix. Read doctor (the
order of the checks), then doctor_machine, doctor_model, doctor_sandbox and doctor_run; ported and origin_keys compare
configs of other systems.
"""
