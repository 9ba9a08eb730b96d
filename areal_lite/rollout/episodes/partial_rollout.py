"""Keep what a stopped or surplus group has sampled, and reuse it when the group reruns.

An episode is code, so it is rerun, not resumed: a call with the same prompt as before gets the same answer, tokens,
log-probs and versions; one that was cut off continues from its tokens. Another prompt is sampled.
"""

from collections.abc import Iterator, Sequence
from areal_lite.api.episode_context import Episode
from areal_lite.api.image_span import images_between
from areal_lite.api.io_struct import ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.api.trajectory import EpisodeStatus, Group, Trajectory, TurnRole
from areal_lite.data.source.rollout_data_source import restarted
from areal_lite.data.source.sample import Sample, SampleStatus
from areal_lite.data.source.source_settings import SampleGroup

_STATUS = {EpisodeStatus.ACCEPTED: SampleStatus.COMPLETED, EpisodeStatus.FAILED: SampleStatus.FAILED}


def sampled_group(group: Group) -> SampleGroup:
    """Return the group as samples that hold what its episodes have sampled, one per path through an episode's turns,
    all with its index; pending if it sampled nothing. If the workflow ran another number of episodes than were drawn,
    nothing is kept, since tokens and samples cannot be matched."""
    by_index = {sample.index: sample for sample in reversed(group.samples)}
    drawn = [by_index[index] for index in dict.fromkeys(sample.index for sample in group.samples)]
    if len(drawn) != len(group.trajectories):
        return restarted(group.samples)
    samples: SampleGroup = []
    for sample, trajectory in zip(drawn, group.trajectories, strict=True):
        paths = list(_paths(sample, trajectory))
        finished = trajectory.reward is not None  # in a stopped group, too
        status = SampleStatus.COMPLETED if finished else _STATUS.get(trajectory.status, SampleStatus.ABORTED)
        for path in paths:
            cut_off = status is SampleStatus.COMPLETED and path.spans[-1].stop_reason == "length"
            path.status = SampleStatus.TRUNCATED if cut_off else status
            path.reward = trajectory.reward
        samples += paths or [sample.sibling(sample.index)]
    return samples


def _paths(sample: Sample, trajectory: Trajectory) -> Iterator[Sample]:
    """Yield one sample per path through the turns; a shared answer counts as sampled in the first only."""
    turns = trajectory.turns
    sampled = [number for number, turn in enumerate(turns) if turn.role is TurnRole.ASSISTANT and len(turn.ids)]
    ancestors = {above for number in sampled for above in trajectory.path_to(number)[:-1]}
    taken: set[int] = set()
    for leaf in sampled:
        if leaf in ancestors:
            continue
        linear = sample.sibling(sample.index)
        for number in trajectory.path_to(leaf):
            turn = turns[number]
            linear.images += tuple(span.moved(len(linear.tokens)) for span in turn.images)
            if turn.role is not TurnRole.ASSISTANT or number in taken:
                linear.append(turn.ids.tolist())
                continue
            taken.add(number)
            linear.append(
                turn.ids.tolist(),
                logprobs=None if turn.logprobs is None else turn.logprobs.tolist(),
                versions=None if turn.versions is None else turn.versions.tolist(),
                sampled=True,
                stop_reason=turn.stop_reason or "stop",
            )
        yield linear


def record_answers(samples: SampleGroup, episodes: Sequence[Episode], *, oldest_version: int) -> None:
    """Record the answers of the samples in their episodes, for reuse; none if one is older than ``oldest_version``."""
    if any(version < oldest_version for sample in samples for version in _sampled_versions(sample)):
        return
    member_indices = {index: number for number, index in enumerate(dict.fromkeys(sample.index for sample in samples))}
    for sample in samples:
        episode = episodes[member_indices[sample.index]]
        before = () if episode.oldest_version is None else (episode.oldest_version,)  # of its other paths
        episode.oldest_version = min((*before, *_sampled_versions(sample)), default=None)
        tokens = list(sample.tokens)
        for start, end, stop_reason in sample.spans:
            answer = ModelResponse(
                input_tokens=[],
                output_tokens=list(sample.tokens[start:end]),
                output_logprobs=list(sample.logprobs[start:end]),
                output_versions=list(sample.versions[start:end]),
                stop_reason=stop_reason,
                images=images_between(sample.images, 0, start),
            )
            episode.record(SharedPromptResponse.of(answer, TokenPrefix(tokens, start)))


def _sampled_versions(sample: Sample) -> set[int]:
    return {version for start, end, _ in sample.spans for version in sample.versions[start:end]}
