"""The inference engine as workflows see it, and what its callers give it beside a workflow: rows and filters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from areal_lite.api.io_struct import ModelRequest, ModelResponse


class FilterDecision(NamedTuple):
    """A filter's decision about a group."""

    keep: bool
    reason: str = ""
    """Why the group is dropped; a short text, by which drops are counted."""


ShouldAcceptFn = Callable[[dict[str, Any]], bool | FilterDecision]
"""A filter gets a group's tensor dict with ``member_idx`` and ``episode_rewards``, the episode of each sequence and its
reward, and returns whether to keep the group, or a decision with its reason."""
Row = Mapping[str, Any]
OLDER_POLICY = "older-policy"
"""Name of the agent whose calls an older version of the policy answers (``older_policy``); its answers never train."""


class InferenceEngine(ABC):
    """The engine as an episode sees it: it generates. The calls that run episodes are those of
    :class:`~areal_lite.rollout.remote_inf_engine.RemoteInfEngine`; inside an episode, only their async forms work."""

    @abstractmethod
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return one complete answer to ``req``; aborts and weight updates do not cut it.

        Raises:
            ConfigError: If the request breaks a rule of the server (too long, bad value).
            ServerError: If no server gave a usable answer within the retry budget.
        """

    async def cut_short(self, rid: str) -> bool:
        """Have call ``rid`` return its tokens so far, with the stop reason ``abort``; return whether the engine can."""
        return False

    @abstractmethod
    def get_version(self) -> int:
        """Return the policy version."""
