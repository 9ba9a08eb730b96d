"""Advantages: how much better each trained token was than expected; the estimators by their names in a YAML."""

from areal_lite.trainer.estimators.group_estimators import (
    dr_grpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
    turn_grpo,
    turn_returns,
)
from areal_lite.trainer.estimators.inputs import Estimate, Estimator, EstimatorInputs, Turns
from areal_lite.trainer.estimators.return_estimators import (
    gae,
    optimal_token_baseline,
    reinforce,
    reinforce_plus_plus,
    remax,
)
from areal_lite.trainer.registry import Registry

__all__ = ["COMPARES_GROUP", "ESTIMATORS", "Estimate", "Estimator", "EstimatorInputs", "Turns"]

_COMPARING = (
    grpo, dr_grpo, grpo_passk, rloo, reinforce_plus_plus_baseline, opo, gpg, optimal_token_baseline, turn_grpo,
    turn_returns,
)  # fmt: skip
COMPARES_GROUP = frozenset(estimator.__name__ for estimator in _COMPARING)
"""Estimators that learn nothing from a group of one."""

ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")
for _estimator in (*_COMPARING, gae, reinforce, reinforce_plus_plus, remax):
    ESTIMATORS.register(_estimator.__name__)(_estimator)
