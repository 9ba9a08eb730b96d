"""What a stopped or surplus group has sampled, kept as samples, and given again when it is run again.

An episode is code, so it is not continued but run again: each of its calls that asks what was asked
before gets the answer of then, tokens, log-probs and versions; a call that was cut off goes on from its
tokens. An episode that asks something else goes its own way.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_lite.api.episode import EpisodeResult, EpisodeStatus, MemberRecord
from areal_lite.api.io_struct import ModelResponse
from areal_lite.data.source.rollout_data_source import Group, restarted
from areal_lite.data.source.sample import Sample, SampleStatus

_STATUS = {EpisodeStatus.ACCEPTED: SampleStatus.COMPLETED, EpisodeStatus.FAILED: SampleStatus.FAILED}


def sampled_group(result: EpisodeResult) -> Group:
    """Return the group of a result with what its members have sampled.

    A member is one sample per linear sequence, all with its index; one that sampled nothing is pending.
    A workflow that ran another number of members than were drawn begins anew: nobody knows whose tokens are whose.
    """
    by_index = {sample.index: sample for sample in reversed(result.samples)}
    drawn = [by_index[index] for index in dict.fromkeys(sample.index for sample in result.samples)]
    if len(drawn) != len(result.members):
        return restarted(result.samples)
    rewards = iter(result.rewards)
    group: Group = []
    for sample, member in zip(drawn, result.members, strict=True):
        own = [next(rewards) for _ in range(member.num_rows)] if result.rewards else []
        sequences = _sequences(sample, member)
        status = _STATUS.get(member.status or result.status, SampleStatus.ABORTED)
        for sequence in sequences:
            cut_off = status is SampleStatus.COMPLETED and sequence.spans[-1].stop_reason == "length"
            sequence.status = SampleStatus.TRUNCATED if cut_off else status
            sequence.reward = sum(own) / len(own) if own else None
        group += sequences or [sample.sibling(sample.index)]
    return group


def _sequences(sample: Sample, member: MemberRecord) -> list[Sample]:
    """Return the linear sequences of a member's answers, those of an earlier run it has not come to included."""
    ahead = [answer for answers in member.recorded.values() for answer in answers]
    sequences: list[Sample] = []
    for call in sorted([*member.turns, *ahead], key=lambda call: call.input_len):
        if not call.output_tokens:
            continue
        fitting = [s for s in sequences if call.input_tokens[: len(s.tokens)] == s.tokens]
        if fitting:
            sequence = max(fitting, key=lambda s: len(s.tokens))
        else:
            sequence = sample.sibling(sample.index)
            sequences.append(sequence)
        sequence.append(call.input_tokens[len(sequence.tokens) :])
        sequence.append(
            call.output_tokens,
            logprobs=call.output_logprobs,
            versions=call.output_versions,
            sampled=True,
            stop_reason=call.stop_reason,
        )
    return sequences


def record_answers(group: Group, members: Sequence[MemberRecord], *, oldest_version: int) -> None:
    """Give the members the answers their samples hold.

    Nothing is given where a token is older than ``oldest_version``: what grew out of it could not be trained.
    """
    if any(version < oldest_version for sample in group for version in _sampled_versions(sample)):
        return
    places = {index: place for place, index in enumerate(dict.fromkeys(sample.index for sample in group))}
    for sample in group:
        recorded = members[places[sample.index]].recorded
        for start, end, stop_reason in sample.spans:
            answer = ModelResponse(
                input_tokens=list(sample.tokens[:start]),
                output_tokens=list(sample.tokens[start:end]),
                output_logprobs=list(sample.logprobs[start:end]),
                output_versions=list(sample.versions[start:end]),
                stop_reason=stop_reason,
            )
            recorded.setdefault(tuple(answer.input_tokens), []).append(answer)


def _sampled_versions(sample: Sample) -> set[int]:
    return {version for start, end, _ in sample.spans for version in sample.versions[start:end]}
