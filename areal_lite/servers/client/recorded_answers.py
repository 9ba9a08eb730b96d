"""The answers that an episode keeps: prompts that extend one share its ids, and a rerun takes them as its own."""

from __future__ import annotations

from dataclasses import replace

from areal_lite.api.episode_context import Episode
from areal_lite.api.io_struct import ModelResponse, SharedPromptResponse, TokenPrefix

MAX_BRANCHES = 8
"""Latest answers of an episode that a prompt may extend to share their ids."""


def continued(ids: list[int], episode: Episode | None) -> TokenPrefix:
    """Return a prompt; if it extends one of the episode's latest answers, it shares that one's ids."""
    if episode is not None and isinstance(ids, list):
        for call in reversed(episode.calls[-MAX_BRANCHES:]):
            before, end = call.prompt, call.input_len + call.output_len
            if ids[before.length : end] == call.output_tokens and ids[: before.length] == before.tolist():
                return before.extended(ids[before.length :])
    return TokenPrefix(list(ids), len(ids))


def own_copy(response: ModelResponse, prefix: TokenPrefix) -> ModelResponse:
    """Return a copy for the record: a workflow may build its next prompt in the answer's lists, not in ``prefix``."""
    copy = replace(
        response,
        input_tokens=[],
        output_tokens=response.output_tokens.copy(),
        output_logprobs=response.output_logprobs.copy(),
        output_versions=response.output_versions.copy(),
        output_top_logprobs=response.output_top_logprobs.copy(),
    )
    return SharedPromptResponse.of(copy, prefix)


def take_recorded(episode: Episode | None, input_ids: list[int]) -> ModelResponse | None:
    """Take the answer that an earlier run of the episode got to this prompt."""
    answers = [] if episode is None else episode.recorded.get(len(input_ids), [])
    for index, answer in enumerate(answers):
        if answer.prompt.tolist() == input_ids:
            return answers.pop(index)
    return None
