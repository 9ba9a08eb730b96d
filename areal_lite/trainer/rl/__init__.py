"""Reinforcement learning: a batch of groups in, a new policy version and its metrics out.

Promises that loss and gradients do not depend on the cut, and that bad settings fail before a model loads. May import
the other rooms of ``trainer``; called by ``runs`` and ``tools``. Read policy_trainer (the stages of a step),
policy_step (its state), step_tokens (its tensors), updates (its passes) and algorithm (what the config chooses).
"""
