"""From a row to a batch: which group starts when, what becomes of it, and which groups train together.

Promises that each group ends once, that no trained token is older than the staleness bound, and that a row drawn from a
data source is trained, dropped or given back. May import ``data.source``, ``processes``, ``config`` and ``api``; called
by ``rollout.remote_inf_engine`` and ``rollout.workers``.
Read workflow_executor (what runs when), group_runner (one group), training_batches (batches of a data source),
row_feed and batch_cut (its groups, and the cut of a batch), admission_gate and lookahead (how many, how early).
"""
