"""Training objectives: losses per token, the weights that sum them, corrections for off-policy data.

Promises pure functions of flat tensors, so that every cut of a step has the same loss. Imports only torch and the names
of the config; called by ``rl/`` and ``supervised/``. Read policy_loss, aggregation, kl and corrections.
"""

from areal_lite.trainer.objectives.aggregation import LossTerms
from areal_lite.trainer.objectives.policy_loss import PolicyInputs

__all__ = ["LossTerms", "PolicyInputs"]
