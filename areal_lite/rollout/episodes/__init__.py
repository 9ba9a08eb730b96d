"""From a row to a batch: which group starts when, what becomes of it, and which groups train together.

Read workflow_executor (what runs when), group_runner (one group), training_batches (batches of a data source),
row_feed and staleness (its groups, and the cut of a batch), admission_gate and lookahead (how many, how early). Called
by ``rollout.remote_inf_engine`` and by rollout workers.
"""
