"""Several episodes of one dataset row, run at once and merged into one trajectory."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any, Literal

from areal_lite.api import episode_context
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.episode import EpisodeStatus, MemberRecord
from areal_lite.api.tensor_dict import Outcome, check_outcome, merge_outcomes
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.data.source.sample import with_own_containers
from areal_lite.errors import ConfigError

OnError = Literal["drop_sample", "drop_group", "raise"]


def error_text(error: BaseException) -> str:
    """Return type, message and the last frames of ``error``, at most 4,000 characters."""
    return "".join(traceback.format_exception(error))[-4000:]


class GroupedRolloutWorkflow(RolloutWorkflow):
    """Runs ``workflow`` ``group_size`` times on one row; siblings never outlive the group.

    Tensor dicts are concatenated along the batch, dicts of interactions are merged. Members that
    return None are left out; if all do, so does the group.

    Args:
        workflow: What one member runs.
        group_size: Members, at least 1.
        on_error: What a failing member does: ``drop_sample`` trains the others (all failing raises the
            first error), ``drop_group`` stops the others and returns None, ``raise`` stops the others
            and raises the error.
    """

    def __init__(self, workflow: RolloutWorkflow, group_size: int, on_error: OnError = "drop_sample") -> None:
        if group_size < 1:
            raise ConfigError(f"group_size is {group_size}: it must be 1 or more")
        if on_error not in ("drop_sample", "drop_group", "raise"):
            raise ConfigError(f"on_error is {on_error!r}: write drop_sample, drop_group or raise")
        self.workflow = workflow
        self.group_size = group_size
        self.on_error = on_error

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Outcome | None:
        """Run all members at once and return their merged trajectory, or None if none has one."""
        context = episode_context.current()
        members = context.members
        if members is None or len(members) != self.group_size:
            members = [MemberRecord(sample_idx=i) for i in range(self.group_size)]
            if context.members is not None:
                context.members[:] = members
        errors: list[Exception] = []

        async def run_member(member: MemberRecord) -> Outcome | None:
            episode_context.enter(
                context._replace(sample_idx=member.sample_idx, member=member, members=[member])
            )
            try:
                outcome = await self.workflow.arun_episode(engine, with_own_containers(dict(data)))
                member.num_rows = check_outcome(outcome)
            except BaseException as error:  # the boundary where a member's error becomes data
                cancelled = isinstance(error, asyncio.CancelledError)
                if cancelled and _cancelled_from_outside():
                    member.status = EpisodeStatus.CANCELLED
                    raise
                member.status, member.error = EpisodeStatus.FAILED, error_text(error)
                failure = error if isinstance(error, Exception) else RuntimeError(f"episode raised {error!r}")
                errors.append(failure)
                if self.on_error == "drop_sample":
                    return None
                raise failure from error
            member.status = EpisodeStatus.REJECTED if outcome is None else EpisodeStatus.ACCEPTED
            return outcome

        dropped = False
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run_member(member)) for member in members]
        except* Exception as failures:
            if self.on_error == "raise":
                raise errors[0] from failures
            dropped = True
        if dropped:
            return None
        kept = [outcome for task in tasks if (outcome := task.result()) is not None]
        if not kept and errors:
            raise errors[0]
        return merge_outcomes(kept) if kept else None


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
