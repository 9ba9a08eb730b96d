"""``areal-lite verify``: proves from a run's folder what can be proved of it. Read verify."""
