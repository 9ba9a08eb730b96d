"""Advantages: how much better each trained token was than expected; the estimators by their names in a YAML.

Promises pure functions in which groups are known by id, and whose advantages are 0 where a group does not say which
answer was better. Imports only torch; called by ``rl/algorithm``. Read inputs, grouping, then advantage_estimators.
"""

from areal_lite.trainer.estimators import group_estimators as by_group
from areal_lite.trainer.estimators import return_estimators as by_return
from areal_lite.trainer.estimators.inputs import Estimate, Estimator, EstimatorInputs, Turns

__all__ = ["COMPARES_GROUP", "ESTIMATORS", "Estimate", "Estimator", "EstimatorInputs", "Turns"]

_COMPARING: tuple[Estimator, ...] = (
    by_group.grpo, by_group.dr_grpo, by_group.grpo_passk, by_group.rloo, by_group.reinforce_plus_plus_baseline,
    by_group.opo, by_group.gpg, by_group.turn_grpo, by_group.turn_returns, by_return.optimal_token_baseline,
)  # fmt: skip
_OTHERS: tuple[Estimator, ...] = by_return.gae, by_return.reinforce, by_return.reinforce_plus_plus, by_return.remax
COMPARES_GROUP = frozenset(estimator.__name__ for estimator in _COMPARING)
"""Estimators that learn nothing from a group of one."""

ESTIMATORS = {estimator.__name__: estimator for estimator in (*_COMPARING, *_OTHERS)}
