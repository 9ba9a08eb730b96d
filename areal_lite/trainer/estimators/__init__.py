"""Advantages: how much better each trained token was than what was expected of it."""

from areal_lite.trainer.estimators.inputs import Estimate, EstimatorInputs

__all__ = ["Estimate", "EstimatorInputs"]
