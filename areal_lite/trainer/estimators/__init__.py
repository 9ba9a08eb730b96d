"""Advantages: how much better each trained token was than expected."""

from areal_lite.trainer.estimators.inputs import Estimate, EstimatorInputs, Turns

__all__ = ["Estimate", "EstimatorInputs", "Turns"]
