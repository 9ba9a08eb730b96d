"""The rollout engine: rows in, groups of finished episodes out.

Promises that each submitted episode ends exactly once (accepted, rejected, failed or cancelled), that a batch holds the
staleness bound, and that what was sampled stays as it was sampled. Knows neither trainer nor agents: an agent comes as
a workflow. May import ``servers`` and what is below; called by ``runs``.
Read remote_inf_engine (calls), engine_lifecycle (start and stop), then episodes/.
"""
