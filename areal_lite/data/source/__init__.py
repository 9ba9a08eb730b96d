"""Draws rows for rollouts, and knows the groups that are still owed.

Promises that each epoch gives each row once, and that a restart loses none. Read source_settings (what a row becomes),
row_streams (the order of rows), rollout_data_source (what is owed), buffered_data_source. Imports ``data.packer`` and
``data.rows``; called by ``rollout.episodes`` and ``runs``.
"""
