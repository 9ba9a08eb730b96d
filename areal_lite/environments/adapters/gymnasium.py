"""``gymnasium:ID``: Gymnasium's environments, and MiniGrid's and BabyAI's, as text.

An observation becomes the environment's own text (``ansi``) if it draws any, MiniGrid's view as a grid of words, or
else the numbers; an action is the last one that the model names, by name or number, or the last JSON list in a space of
several numbers. Functions of the user's replace either.
"""

import importlib
import json
import math
import re
from typing import Any
import gymnasium
import numpy as np
from gymnasium import spaces
from areal_lite.config.dotted_path import load_object
from areal_lite.environments.environment import Step, WrongAction
from areal_lite.errors import ConfigError

_NAMES = {
    "Blackjack": "stick hit",
    "CartPole": "left right",
    "CliffWalking": "up right down left",
    "FrozenLake": "left down right up",
    "MountainCar-": "left none right",
    "Taxi": "south north east west pickup dropoff",
}
"""Names of actions that the libraries only have in their documentation, by the beginning of the id."""


class GymnasiumGame:
    """One environment.

    Args:
        name: Its id; MODULE:ID imports a module that registers it.
        to_text: Dotted path of a function from an observation to text.
        to_action: Dotted path of a function from the model's text to an action; it raises WrongAction.
        kwargs: Arguments of ``gymnasium.make``.
    """

    def __init__(self, name: str, *, to_text: str | None = None, to_action: str | None = None, **kwargs: Any) -> None:
        self._game = gymnasium.make(name, **kwargs)
        if "render_mode" not in kwargs and "ansi" in self._game.metadata.get("render_modes", ()):
            self._game = gymnasium.make(name, render_mode="ansi", **kwargs)
        self._to_text = self._text if to_text is None else load_object(to_text, where="workflow_kwargs.kwargs.to_text")
        self._to_action = load_object(to_action, where="to_action") if to_action else self._action
        self._names = _action_names(name, self._game)
        start = int(self._game.action_space.start) if self._names else 0
        self._by_word = {str(number): number for number in range(start, start + len(self._names))}
        self._by_word |= {name: number for number, name in enumerate(self._names, start)}

    @staticmethod
    def check(name: str) -> None:
        """Check that there is such an id; raises ConfigError."""
        module = "minigrid" if name.startswith(("MiniGrid", "BabyAI")) else name.rpartition(":")[0]
        try:
            if module:
                importlib.import_module(module)
            gymnasium.spec(name.rpartition(":")[2])
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ConfigError(f"env gymnasium:{name}: {error}") from None

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        self._over = False
        self._game.action_space.seed(seed)
        seen, _ = self._game.reset(seed=seed)
        return f"{self._to_text(seen)}\n\n{self._rule()}"

    async def step(self, action: Any) -> Step:
        if self._over:
            raise RuntimeError("step after the end: reset begins another episode")
        seen, reward, done, truncated, info = self._game.step(self._to_action(action))
        self._over = bool(done or truncated)
        return Step(self._to_text(seen), float(reward), bool(done), bool(truncated), info)

    async def close(self) -> None:
        self._game.close()

    def _rule(self) -> str:
        if self._names:
            return f"Reply with one action: {', '.join(self._names)}."
        space: Any = self._game.action_space
        numbers = math.prod(space.shape)
        limits = f", from {np.min(space.low):g} to {np.max(space.high):g}" if hasattr(space, "low") else ""
        return f"Reply with one action as a JSON list of {numbers} number{'s' if numbers > 1 else ''}{limits}."

    def _text(self, seen: Any) -> str:
        if self._game.render_mode == "ansi":
            # Without terminal colours; what has a background, as the player's place, is in brackets.
            marked = re.sub(r"\x1b\[(?:\d+;)?4\dm(.*?)\x1b\[0m", r"[\1]", str(self._game.render()))
            return re.sub(r"\x1b\[[\d;]*m", "", marked).strip("\n")
        if isinstance(seen, dict) and {"image", "direction", "mission"} <= seen.keys():
            return _minigrid_text(seen)
        return json.dumps(seen, default=lambda value: np.asarray(value).round(3).tolist())

    def _action(self, text: str) -> Any:
        text, space = text.rpartition("</think>")[2], self._game.action_space
        if self._names:
            words = [word for word in re.findall(r"[a-z_]+|-?\d+", text.lower()) if word in self._by_word]
            if not words:
                raise WrongAction(f"That names no action. {self._rule()}")
            return self._by_word[words[-1]]
        for written in reversed(re.findall(r"\[[^\[\]]*\]", text)):
            try:
                action = np.asarray(json.loads(written), dtype=space.dtype).reshape(space.shape)
            except (ValueError, TypeError, OverflowError):
                continue
            if space.contains(action):
                return action
        raise WrongAction(f"That is no action. {self._rule()}")


def _action_names(name: str, game: Any) -> list[str]:
    """Return the name of each action of a discrete space, in order; empty for another space."""
    space = game.action_space
    if not isinstance(space, spaces.Discrete):
        return []
    if (actions := getattr(game.unwrapped, "actions", None)) is not None and len(actions) == space.n:
        return [action.name for action in actions]
    known = next((names.split() for begin, names in _NAMES.items() if name.startswith(begin)), [])
    return known if len(known) == space.n else [str(space.start + place) for place in range(space.n)]


def _minigrid_text(seen: dict[str, Any]) -> str:
    from minigrid.core import constants

    states = {number: name for name, number in constants.STATE_TO_IDX.items()}

    def cell(kind: int, colour: int, state: int) -> str:
        name = constants.IDX_TO_OBJECT[kind]
        if name in ("unseen", "empty", "wall"):
            return {"unseen": "?", "empty": ".", "wall": "#"}[name]
        return " ".join([*([states[state]] if name == "door" else []), constants.IDX_TO_COLOR[colour], name])

    lines = [" | ".join(cell(*map(int, each)) for each in line) for line in seen["image"].transpose(1, 0, 2)]
    facing = ("east", "south", "west", "north")[int(seen["direction"])]
    where = "You stand at the middle of the last line and look up the lines"
    return f"Mission: {seen['mission']}\n{where} ({facing}). '?' is hidden, '.' free, '#' wall.\n" + "\n".join(lines)
