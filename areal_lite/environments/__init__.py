"""Environments: what an agent acts in, from one line of YAML (``env: PREFIX:NAME``) or from a class of the user's.

Promises that every environment is played by one loop, that an episode starts from the run's seed and its row alone, and
that what goes wrong in an environment fails the episode instead of rewarding it. Imports api, config, processes and
errors, each library only when its prefix is used, and data for the order of a mixture; a run without environments
imports nothing here. Read environment (what users write), environment_agent (the loop), catalog (names, rows, keys of a
YAML), mixture, random_state, environment_process, then adapters.
"""

from areal_lite.environments.environment import Environment, Observation, Step, ToolCall, WrongAction

__all__ = ["Environment", "Observation", "Step", "ToolCall", "WrongAction"]
