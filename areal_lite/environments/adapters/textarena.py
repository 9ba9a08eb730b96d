"""``textarena:ID``: TextArena's games, alone or with the model in every seat. Each seat reads only what is new to it.
The rewards of all seats come with the end of the game."""

from typing import Any
import textarena
from areal_lite.environments.environment import Observation, Step
from areal_lite.errors import ConfigError, did_you_mean

_MOST_PLAYERS = 15


class TextArenaGame:
    """One game.

    Args:
        name: Its id, such as Wordle-v0.
        players: Seats; None takes the fewest that the game is for.
        kwargs: Arguments of ``textarena.make``.
    """

    def __init__(self, name: str, *, players: int | None = None, **kwargs: Any) -> None:
        self._game = self._inner = textarena.make(name, **kwargs)
        while isinstance(self._inner, textarena.Wrapper):  # the inner one gives messages, the wrappers a whole history
            self._inner = self._inner.env
        self.players = players or 0

    @staticmethod
    def check(name: str) -> None:
        """Check that there is such a game; raises ConfigError."""
        known = textarena.envs.registration.ENV_REGISTRY
        if name not in known:
            hint = did_you_mean(name, known, "; its README lists them", count=3)
            raise ConfigError(f"env textarena:{name}: TextArena has no game {name!r}{hint}")

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        counts = [self.players] if self.players else range(1, _MOST_PLAYERS + 1)
        for self.players in counts:
            try:
                self._game.reset(num_players=self.players, seed=seed)
                break
            except (AssertionError, ValueError):  # how games refuse a number of players
                if self.players == counts[-1]:
                    raise
        return Observation(*self._seen())

    async def step(self, action: Any) -> Step:
        done, _ = self._game.step(action=action.rpartition("</think>")[2].strip())
        if not done:
            text, player = self._seen()
            return Step(text, player=player)
        rewards, _ = self._inner.close()
        return Step(reward=rewards or {}, done=True)

    async def close(self) -> None:
        pass

    def _seen(self) -> tuple[str, int]:
        """Return what is new to the player who acts next, but for its own words, and its seat."""
        player, messages = self._inner.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        names = self._inner.state.role_mapping
        return "\n".join(
            text if sender == textarena.GAME_ID else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in messages
            if not (sender == player and kind is own)
        ), player
