"""Combine the run's sampling parameters with those an agent asks for. Pure, except for one warning.

An agent may shorten an answer (max_tokens, stop) and set its seed. While training, the run alone sets what changes the
distribution, because the trainer divides logits by the run's temperature.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from areal_lite.agents.session.chat_request import ChatRequest
from areal_lite.agents.session.request_fields import RequestError
from areal_lite.config.generation import GenerationHyperparameters

logger = logging.getLogger(__name__)


def request_gconfig(
    gconfig: GenerationHyperparameters, request: ChatRequest, *, choice: int, prompt_tokens: int, agent_samples: bool
) -> GenerationHyperparameters:
    """Return the sampling parameters of one answer.
    ``choice`` is its index among the request's ``n``; each has a seed of its own. ``agent_samples`` applies the agent's
    temperature, top_p, penalties and logit_bias.
    """
    room = gconfig.max_tokens - prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and gconfig.max_tokens is {gconfig.max_tokens}, which leaves no "
            "room for an answer: shorten the messages, or raise gconfig.max_tokens",
            param="messages",
            code="context_length_exceeded",
        )
    asked = request.options
    max_new_tokens = min(asked.max_completion_tokens or asked.max_tokens or room, gconfig.max_new_tokens, room)
    changes: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min(max(gconfig.min_new_tokens, asked.min_tokens), max_new_tokens),
        **request.grammar,
    }
    if asked.stop:
        changes["stop"] = [*(gconfig.stop or []), *asked.stop]
    if asked.stop_token_ids:
        changes["stop_token_ids"] = [*(gconfig.stop_token_ids or []), *asked.stop_token_ids]
    if asked.ignore_eos:
        changes["ignore_eos"] = True
    if (seed := gconfig.seed if asked.seed is None else asked.seed) is not None:
        changes["seed"] = seed + choice
    changes |= _distribution(gconfig, asked.sampling, agent_samples)
    if asked.logit_bias and agent_samples:
        changes["logit_bias"] = asked.logit_bias
    elif asked.logit_bias:
        warn_once(f"logit_bias={asked.logit_bias}"[:80])
    changes = {name: value for name, value in changes.items() if getattr(gconfig, name) != value}
    return gconfig.new(**changes) if changes else gconfig


def _distribution(
    gconfig: GenerationHyperparameters, asked: Mapping[str, float], agent_samples: bool
) -> dict[str, Any]:
    run_values = {name: getattr(gconfig, name) for name in asked}
    run_values |= {"temperature": gconfig.effective_temperature, "top_k": gconfig.top_k or -1}
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value != run_values[name]}
    if changes and not agent_samples:
        warn_once(", ".join(f"{name}={value}" for name, value in changes.items()))
        return {}
    if "temperature" in changes:
        changes["greedy"] = False
    if "top_k" in changes:
        changes["top_k"] = int(changes["top_k"]) if changes["top_k"] >= 1 else None
    return changes


@functools.lru_cache(maxsize=64)
def warn_once(ignored: str) -> None:
    """Warn about ignored parameters, once per process instead of once per episode."""
    logger.warning(
        "the agent sets %s: ignored, because the trainer assumes the distribution of the run's gconfig", ignored
    )
