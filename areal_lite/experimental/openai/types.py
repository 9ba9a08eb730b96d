"""The record of one chat completion, under the module name of AReaL."""

from areal_lite.api.interaction import InteractionWithTokenLogpReward

__all__ = ["InteractionWithTokenLogpReward"]
