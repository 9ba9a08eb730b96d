"""``areal-lite doctor`` and ``--dry-run``: checks whether this machine, model and config are able to run.

Promises that nothing but a temporary folder changes, and that each finding says value, rule and fix. Read doctor (the
order), doctor_machine, doctor_model, doctor_sandbox, doctor_run; ported and origin_keys compare other systems' configs.
"""
