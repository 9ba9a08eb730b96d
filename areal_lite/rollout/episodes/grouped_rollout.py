"""Several episodes of one dataset row, run at once and merged into one group."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from areal_lite.api import episode_context
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.episode_context import Episode
from areal_lite.api.failure import Failure, FailureKind, attributed_to
from areal_lite.api.tensor_dict import check_same_keys, is_interactions, merge_outcomes, split_rows
from areal_lite.api.trajectory import EpisodeStatus
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.data.source.sample import with_own_containers
from areal_lite.errors import ConfigError

OnError = Literal["drop_episode", "drop_group", "raise"]


class GroupedRolloutWorkflow(RolloutWorkflow):
    """Runs ``workflow`` ``group_size`` times on one row; siblings never outlive the group. When an episode fails,
    ``drop_episode`` trains the others (if all fail, it raises the first error), ``drop_group`` stops the others and
    drops the group, ``raise`` stops the others and raises the error."""

    def __init__(self, workflow: RolloutWorkflow, group_size: int, on_error: OnError = "drop_episode") -> None:
        if group_size < 1:
            raise ConfigError(f"group_size is {group_size}: it must be 1 or more")
        if on_error not in ("drop_episode", "drop_group", "raise"):
            raise ConfigError(f"on_error is {on_error!r}: write drop_episode, drop_group or raise")
        self.workflow = workflow
        self.group_size = group_size
        self.on_error = on_error

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run all episodes at once and merge what they return (tensor dicts along the batch); None if all gave None."""
        episodes = episode_context.current().episodes
        kept = await self.run_episodes(engine, data, [Episode()] if episodes is None else episodes)
        return merge_outcomes(kept) if kept else None

    async def run_episodes(
        self, engine: InferenceEngine, data: dict[str, Any], episodes: list[Episode]
    ) -> list[dict[str, Any]]:
        """Run ``episodes``, resized to the group's size; each gets its trajectory. Return the values of those that
        finished with data, by ``member_idx``; none for a dropped group."""
        if len(episodes) != self.group_size:
            seed_name = episodes[0].seed_name if episodes else None
            episodes[:] = [Episode(member_idx=i, seed_name=seed_name) for i in range(self.group_size)]
        context = episode_context.current()
        errors: list[Exception] = []

        async def run_one(episode: Episode) -> dict[str, Any] | None:
            episode_context.enter(context._replace(member_idx=episode.member_idx, episode=episode, episodes=[episode]))
            try:
                returned = await _run_code(self.workflow, engine, with_own_containers(dict(data)), episode)
                returned = _with_keyed_rewards(returned, [episode])
                episode.trajectory = trajectory_of(returned, episode.calls, member_idx=episode.member_idx)
            except BaseException as error:  # the boundary where an episode's error becomes data
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # cancelled from outside
                failure = Failure.of(error)
                episode.end(EpisodeStatus.FAILED, failure)
                errors.append(error if isinstance(error, Exception) else _exception(error, failure.kind))
                if self.on_error == "drop_episode":
                    return None
                raise errors[-1] from None
            return returned

        dropped = False
        try:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(run_one(episode)) for episode in episodes]
            except* Exception as failures:
                _drop(episodes)
                if self.on_error == "raise":
                    raise errors[0] from failures
                dropped = True
            if dropped:
                return []
            kept = [returned for task in tasks if (returned := task.result()) is not None]
            if not kept and errors:
                raise errors[0]
        finally:
            errors.clear()  # their frames refer to this list: a cycle that would keep the group's tokens
        with attributed_to(FailureKind.OUTPUT):
            check_same_keys([returned for returned in kept if not is_interactions(returned)])
        return kept


async def run_group(
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    data: dict[str, Any],
    episodes: list[Episode],
    on_error: OnError = "drop_episode",
) -> None:
    """Run ``workflow`` on ``data`` once for each of ``episodes``; each that finished gets its trajectory. If none is
    left to train, its exception is raised. ``episodes`` decides the size of the group. A workflow that runs a
    :class:`GroupedRolloutWorkflow` of its own changes the list: it has as many episodes as that group then."""
    if len(episodes) > 1:
        workflow = GroupedRolloutWorkflow(workflow, len(episodes), on_error)
    if isinstance(workflow, GroupedRolloutWorkflow):
        await workflow.run_episodes(engine, data, episodes)
        return
    returned = _with_keyed_rewards(await _run_code(workflow, engine, data, episodes[0]), episodes)
    if len(episodes) == 1 and episodes[0].trajectory is None:
        episodes[0].trajectory = trajectory_of(returned, episodes[0].calls)
    else:  # a workflow around a group: it may have changed what the group returned
        counts = [0 if e.trajectory is None else len(e.trajectory.sequences) for e in episodes]
        parts = [None] * len(episodes) if returned is None else split_rows(returned, counts)
        for episode, part, count in zip(episodes, parts, counts, strict=True):
            if part is not None or count:
                episode.trajectory = trajectory_of(part, episode.calls, member_idx=episode.member_idx)


def _exception(error: BaseException, kind: FailureKind) -> Exception:
    raised = RuntimeError(f"episode raised {error!r}")
    raised.failure_kind = kind  # type: ignore[attr-defined]
    return raised


async def _run_code(
    workflow: RolloutWorkflow, engine: InferenceEngine, data: dict[str, Any], episode: Episode
) -> dict[str, Any] | None:
    """Run the code of ``episode``; the error of :meth:`Episode.fail` comes before what the code returned or raised."""
    episode.task = task = asyncio.current_task()
    assert task is not None
    try:
        try:
            returned = await workflow.arun_episode(engine, data)
        except BaseException as error:
            key = error.args[0] if isinstance(error, KeyError) and error.args else None
            if isinstance(key, str) and key.isidentifier() and key not in data:
                error.failure_hint = f"If that is a column: the row has {', '.join(map(str, data))}"  # type: ignore[attr-defined]
            if episode.error is None or task.uncancel():  # the run stops it as well
                raise
        if episode.error is not None:
            raise episode.error
        return returned
    finally:
        episode.task = episode.error = None  # the error's frames refer to the episode: a cycle would keep its tokens


def _with_keyed_rewards(returned: dict[str, Any] | None, episodes: Sequence[Episode]) -> dict[str, Any] | None:
    """Return what a workflow returned, with the part ``rollout.rewards.key`` of ``rewards`` that are a dict by name; an
    error if no reward function chose that part either. Agents choose their own."""
    key = episode_context.current().reward_key
    if key is None or not returned or is_interactions(returned) or any(f"reward/{key}" in e.counts for e in episodes):
        return returned
    with attributed_to(FailureKind.REWARD):
        if not isinstance(parts := returned.get("rewards"), Mapping) or key not in parts:
            raise ValueError(
                f"rollout.rewards.key is {key!r}, and no reward of the episode has that part: return it from the "
                "reward function or in rewards, a dict of tensors by name; or remove rewards.key"
            )
        episodes[0].counts |= {f"reward/{name}": float(part.float().mean()) for name, part in parts.items()}
    return returned | {"rewards": parts[key]}


def _drop(episodes: Sequence[Episode]) -> None:
    failure = Failure.cancelled("the group was dropped because another episode failed")
    for episode in episodes:
        trajectory = episode.end(EpisodeStatus.CANCELLED, failure)
        if trajectory.sequences:
            trajectory.sequences.clear()
            trajectory.status, trajectory.failure = EpisodeStatus.CANCELLED, failure
