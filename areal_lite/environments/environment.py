"""What an environment is: three methods that a class of the user's has, and the records that they return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Messages = str | list[dict[str, Any]]
"""What the model reads next: the text of a user's message, or messages in OpenAI's form."""


class ToolCall(NamedTuple):
    """A call of one of the environment's tools; its arguments are a JSON object with all that the schema requires."""

    id: str
    name: str
    arguments: dict[str, Any]

    def result(self, content: str) -> dict[str, Any]:
        """Return the message that answers this call."""
        return {"role": "tool", "tool_call_id": self.id, "content": content}


@dataclass(frozen=True, slots=True)
class Observation:
    """What the player who acts next reads."""

    messages: Messages
    player: int = 0
    """Seat of the player, from 0."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an action led to."""

    messages: Messages = ""
    """What ``player`` reads next; ignored at the end."""
    reward: float | Mapping[int, float] = 0.0
    """The acting player's reward, or several by seat. An episode's is the sum, or as ``rollout.turn_rewards`` says."""
    done: bool = False
    """The episode has ended by the environment's own rules."""
    truncated: bool = False
    """The episode was cut, as by a limit of turns."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the step. The numbers of the last one become metrics of the run."""
    player: int = 0
    """Seat of the player who acts next."""


class WrongAction(ValueError):
    """An action that the environment does not understand: the model reads the text and acts again."""


class Environment(Protocol):
    """One episode; an object is made for each. No base class is needed.

    It may also have ``tools() -> list[dict]``, OpenAI's schemas of its tools after ``reset``; ``solution(row) -> str``,
    an answer of full reward; ``players``, the number of seats after ``reset``, of which the model plays all;
    ``reward_range``, the least and greatest reward of an episode; and static ``rows(size, seed)``, the dataset rows.
    """

    async def reset(self, row: dict[str, Any], seed: int) -> Observation | Messages:
        """Begin the episode of a dataset row.

        Args:
            seed: From 0 to 2**31 - 1, the same for all members of a group. Draw from ``random.Random(seed)``, or from
                the process-wide ``random`` and ``numpy.random``, which are the episode's own inside these methods.
        """
        ...

    async def step(self, action: str | list[ToolCall]) -> Step:
        """Take one action: the model's text, or its tool calls where ``tools`` offers any.

        Raises:
            WrongAction: If it means nothing here.
        """
        ...

    async def close(self) -> None:
        """Release what the episode holds; always called once, after a failure too."""
        ...
