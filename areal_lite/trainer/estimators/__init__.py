"""Advantages: how much better each trained token was than expected; the estimators by their names in a YAML.

Promises pure functions in which groups are known by id, and whose advantages are 0 where a group does not say which
answer was better. Imports only torch; called by ``rl/algorithm``. Read inputs, then advantage_estimators.
"""

from areal_lite.trainer.estimators.advantage_estimators import COMPARES_GROUP, ESTIMATORS
from areal_lite.trainer.estimators.inputs import Estimate, Estimator, EstimatorInputs, Turns

__all__ = ["COMPARES_GROUP", "ESTIMATORS", "Estimate", "Estimator", "EstimatorInputs", "Turns"]
