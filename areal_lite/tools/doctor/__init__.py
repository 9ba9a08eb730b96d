"""``areal-lite doctor``: is this machine, model and config able to run? Read doctor."""
