"""``areal-lite sweep``: one config with several values and seeds, and statistics over the seeds.

Promises that the same command continues a stopped sweep. Read sweep, then seed_statistics.
"""
