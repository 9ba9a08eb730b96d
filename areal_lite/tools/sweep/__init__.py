"""``areal-lite sweep``: one config with several values and seeds, and statistics over the seeds."""
