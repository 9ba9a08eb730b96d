"""``skyrl-gym:ID``: environments of SkyRL's gym, around rows in SkyRL's form."""

from typing import Any
import skyrl_gym
from areal_lite.environments.environment import Messages, Step


class SkyRLGymEnvironment:
    """One environment of skyrl_gym.

    Args:
        name: Its id, such as gsm8k.
        prompt_key: Column of the prompt's messages; the others, as ``reward_spec``, go to the environment.
        env_config: The environment's settings.
    """

    def __init__(self, name: str, *, prompt_key: str = "prompt", env_config: dict[str, Any] | None = None) -> None:
        self._name, self._prompt_key, self._config = name, prompt_key, env_config or {}
        self._game: Any = None

    async def reset(self, row: dict[str, Any], seed: int) -> Messages:
        self._game = skyrl_gym.make(self._name, env_config=self._config, extras=row)
        prompt = row[self._prompt_key]
        messages, _ = self._game.init([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        return list(messages)

    async def step(self, action: Any) -> Step:
        made = self._game.step(action)
        return Step(list(made["observations"]), float(made["reward"]), bool(made["done"]), info=made["metadata"])

    async def close(self) -> None:
        if self._game is not None:
            self._game.close()
