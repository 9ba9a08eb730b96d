"""Reinforcement learning: a batch of groups in, a new policy version and its metrics out.

Read policy_trainer (the stages of a step), policy_step (its state), step_tokens (its tensors) and algorithm (the
functions that the config names).
"""
