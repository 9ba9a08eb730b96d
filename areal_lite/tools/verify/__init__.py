"""``areal-lite verify``: proves from a run's folder what can be proved of it.

Promises that it says what it could not prove or read, and imports nothing that the folder's config names without
``--trust-config``. Read verify (the order of the checks) and verify_run (what they see), then a file of checks.
"""
