"""Training objectives: losses per token or pair, the weights that sum them, corrections for off-policy data."""

from areal_lite.trainer.objectives.aggregation import LossTerms
from areal_lite.trainer.objectives.policy_loss import PolicyInputs

__all__ = ["LossTerms", "PolicyInputs"]
