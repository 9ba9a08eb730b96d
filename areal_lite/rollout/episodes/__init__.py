"""From a row to a batch: which group starts when, what becomes of it, and which groups train together.

Read workflow_executor (what runs when), group_runner (one group), row_feed (rows in, batches out), admission_gate and
lookahead (how many, how early). Called by ``rollout.remote_inf_engine`` and by rollout workers.
"""
