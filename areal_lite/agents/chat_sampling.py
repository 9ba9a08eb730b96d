"""Which sampling one request gets: what the run decides and what an agent may. Pure, but for one warning.

An agent may shorten an answer (max_tokens, stop) and seed it. What changes the distribution is the
run's while training: the trainer divides by the run's temperature.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from areal_lite.agents.chat_request import ChatRequest
from areal_lite.agents.request_error import RequestError
from areal_lite.api.generation import GenerationHyperparameters

logger = logging.getLogger(__name__)


def request_gconfig(
    gconfig: GenerationHyperparameters, request: ChatRequest, *, prompt_tokens: int, agent_samples: bool
) -> GenerationHyperparameters:
    """Return the sampling of one request.

    Args:
        gconfig: The run's.
        request: What the agent asks for.
        prompt_tokens: Length of the prompt; ``gconfig.max_tokens`` bounds prompt and answer together.
        agent_samples: Whether the agent's temperature, top_p, top_k and frequency_penalty count.

    Raises:
        RequestError: ``context_length_exceeded`` if no room is left for an answer.
    """
    room = gconfig.max_tokens - prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and gconfig.max_tokens is {gconfig.max_tokens}, so no room is "
            "left for an answer: shorten the messages, or raise gconfig.max_tokens",
            param="messages",
            code="context_length_exceeded",
        )
    max_new_tokens = min(request.max_tokens or room, gconfig.max_new_tokens, room)
    changes: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min(gconfig.min_new_tokens, max_new_tokens),
    }
    if request.stop:
        changes["stop"] = [*(gconfig.stop or []), *request.stop]
    if request.seed is not None:
        changes["seed"] = request.seed
    if request.sampling:
        changes |= _distribution(gconfig, request.sampling, agent_samples)
    changes = {name: value for name, value in changes.items() if getattr(gconfig, name) != value}
    return gconfig.new(**changes) if changes else gconfig


def _distribution(
    gconfig: GenerationHyperparameters, asked: Mapping[str, float], agent_samples: bool
) -> dict[str, Any]:
    """Return the wishes that are followed; warn of the others."""
    of_run = {
        "temperature": gconfig.effective_temperature,
        "top_p": gconfig.top_p,
        "top_k": gconfig.top_k or -1,
        "frequency_penalty": gconfig.frequency_penalty,
        "repetition_penalty": 1,
    }
    others = {name: value for name, value in asked.items() if value != of_run.get(name, 0)}
    followed: dict[str, Any] = {}
    if agent_samples:
        for name in ("temperature", "top_p", "top_k", "frequency_penalty"):
            if name in others:
                followed[name] = others.pop(name)
        if "temperature" in followed:
            followed["greedy"] = False
        if "top_k" in followed:
            followed["top_k"] = int(followed["top_k"]) if followed["top_k"] >= 1 else None
    if others:
        warn_once(", ".join(f"{name}={value}" for name, value in others.items()))
    return followed


@functools.lru_cache(maxsize=64)
def warn_once(asked: str) -> None:
    """Warn of wishes that are not followed, once per process and not once per episode."""
    logger.warning(
        "the agent asks for %s: not followed, the run's gconfig decides, for the trainer learns from that",
        asked,
    )
