"""Inference servers: requests to them, their state, their programs, and the way of new weights to them.

Promises that a token has the id, log-prob and version that its server reported, that an answer survives aborts, weight
updates and lost servers without a token twice or lost, and that every server converges to the newest weights. Knows
neither episodes nor training. May import ``models`` and what is below; called by ``rollout``, ``embedded``, ``runs``.
"""
