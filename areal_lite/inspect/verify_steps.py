"""Checks of the steps: dumps against metrics.jsonl, advantages computed again from rewards, the staleness bound."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from areal_lite.api.config import RunConfig
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence, Trajectory
from areal_lite.errors import ArealLiteError
from areal_lite.inspect.episode_text import read_records
from areal_lite.inspect.training_facts import fact_files
from areal_lite.inspect.verify_run import EVALUATION, SLACK_S, DumpedGroup, Record, Run, began, differs, some

RunCheck = Callable[[Run], Iterator[str]]
MISMATCH = 0.1
"""Mean difference of log-probs (nats) beyond which a server did not have the trainer's weights (docs/metrics.md)."""


# -- metrics.jsonl alone


def steps_are_whole(run: Run) -> Iterator[str]:
    """Every step has one record, and each trained as many groups as the config says."""
    yield from run.broken_metrics
    numbers = [record["step"] for record in run.steps]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"metrics.jsonl has the steps {some(numbers, 20)}: each must be there once, from 1 on"
    times = [record["time"] for record in run.metrics]
    if any(after < before - SLACK_S for before, after in itertools.pairwise(times)):
        yield "the records of metrics.jsonl are not in the order of their times"
    if run.rl is None or run.rl.rollout_cache or run.rl.data_packer:
        return
    size = run.rl.rollout.consumer_batch_size
    for record in run.steps:
        if record.get("train/groups") != size:
            yield f"step {record['step']} trained {record.get('train/groups')} groups, and a batch has {size}"


def servers_had_the_weights(run: Run) -> Iterator[str]:
    """Tokens of the current version have the trainer's own log-probs."""
    for record in run.steps:
        mean = record.get("train/engine_mismatch/log_prob_diff_mean", 0.0)
        if mean is None or mean > MISMATCH:
            yield (
                f"step {record['step']}: log-probs of servers and trainer differ by {mean} nats on average: a server "
                "had other weights, or samples in another way"
            )


def updates_are_recorded(run: Run) -> Iterator[str]:
    """skipped_updates.jsonl has every update that metrics.jsonl counts as skipped."""
    path = run.root / "skipped_updates.jsonl"
    logged = Counter(record.get("step") for record in read_records(path)) if path.is_file() else Counter()
    for record in run.steps:
        counted = (record.get("train/skipped_updates") or 0) + (record.get("train/critic_skipped_updates") or 0)
        if counted > logged[record["step"] - 1]:
            yield f"step {record['step']} skipped {counted:g} updates, and skipped_updates.jsonl has fewer"


def staleness_is_within_the_bound(run: Run) -> Iterator[str]:
    """No step and no trained token is older than ``rollout.max_head_offpolicyness``."""
    if run.rl is None:
        return
    bound = run.rl.rollout.max_head_offpolicyness
    for record in run.steps:
        if (oldest := record.get("train/staleness_max") or 0) > bound:
            yield f"step {record['step']} trained tokens {oldest:g} versions old; the bound is {bound}"
    for group in run.trained:
        if group.head is not None and group.tail is not None and group.tail - group.head > bound:
            yield f"{group.id}: its trained tokens have the versions {group.head} to {group.tail}; the bound is {bound}"


# -- all groups


def groups_ended_once(run: Run) -> Iterator[str]:
    """Every task id is there once, without gaps, and no model call is in two trained groups."""
    counts = Counter(group.task for group in run.groups)
    if several := [task for task, count in counts.items() if count > 1]:
        yield f"the tasks {some(several)} are there more than once"
    ids = {task for task in counts if isinstance(task, int)}
    if missing := sorted(set(range(max(ids, default=-1) + 1)) - ids):
        if run.complete:
            yield f"the tasks {some(missing)} are missing: {len(missing)} groups never ended, or their dumps are gone"
        else:
            run.unproved.append(
                f"that each group ended: {len(missing)} task ids are missing, as a run that was killed or runs has them"
            )
    if run.restarted:
        return  # a resumed run may train the calls of a lost step again
    seen: dict[str, str] = {}
    for group in run.trained:
        for call in group.calls:
            if seen.setdefault(call, group.id) != group.id:
                yield f"{group.id} has a model call of {seen[call]}: it is a copy"
                break


# -- dumps against metrics


def steps_match_dumps(run: Run) -> Iterator[str]:
    """Sequences, groups, tokens and rewards of the dumps sum to those of metrics.jsonl."""
    if not comparable(run):
        return
    trained = [group for group in run.trained if group.finished >= run.first_moment]
    if len(run.trained) > len(trained):
        run.unproved.append(f"{len(run.trained) - len(trained)} groups are of an earlier start, which was lost")
    names = ("groups", "sequences", "trained_tokens", "episodes")
    expected = [sum(record.get(f"train/{name}") or 0 for record in run.steps) for name in names]
    found = [
        len(trained),
        sum(group.lines for group in trained),
        sum(group.trained for group in trained),
        sum(len(group.rewards) for group in trained),
    ]
    for name, wanted, count in zip(names, expected, found, strict=True):
        if count < wanted or (count > wanted and run.complete):
            yield f"metrics.jsonl has {wanted:g} {name} over all steps, and the dumps have {count}"
    if run.rl is not None and run.rl.reward_model is None and found == expected:
        total = math.fsum(reward for group in trained for reward in group.rewards)
        wanted = math.fsum((r.get("train/reward_mean") or 0) * r["train/episodes"] for r in run.steps)
        if differs(total / max(1, found[3]), wanted / max(1, found[3])):
            yield f"the mean reward over all steps is {wanted / found[3]:.6f}, and {total / found[3]:.6f} in the dumps"


def comparable(run: Run) -> bool:
    """Return whether dumps and metrics describe the same sequences."""
    return bool(
        run.rl is not None
        and run.rl.rollout.dump_to_file
        and not (run.rl.data_packer or run.rl.rollout_cache)
        and run.steps
        and "train/groups" in run.steps[0]
    )


def evaluations_match_dumps(run: Run) -> Iterator[str]:
    """Rewards and counts of each evaluation are those of the held-out episodes dumped in its time."""
    if run.rl is None or not run.rl.rollout.dump_to_file:
        return
    for record in run.evaluations:
        first, last = began(record) - SLACK_S, record["time"] + SLACK_S
        groups = [
            group
            for group in run.groups
            if group.scope == EVALUATION and group.start == record["step"] and first <= group.finished <= last
        ]
        rewards = [reward for group in groups for reward in group.rewards]
        failed = sum(not group.accepted for group in groups)
        where = f"the evaluation after step {record['step']}"
        if (len(rewards), failed) != (record["eval/episodes"], record["eval/failed"]):
            yield (
                f"{where} has {record['eval/episodes']:g} episodes and {record['eval/failed']:g} failed, and the dumps "
                f"have {len(rewards)} and {failed}"
            )
        elif rewards and differs(record["eval/reward"], math.fsum(rewards) / len(rewards)):
            mean = math.fsum(rewards) / len(rewards)
            yield f"{where} has the reward {record['eval/reward']}, and its episodes have {mean}"
        for group in groups:
            if group.tail is not None and (group.head, group.tail) != (record["step"], record["step"]):
                yield f"{where}: {group.id} was sampled by the versions {group.head} to {group.tail}"


def batches_can_be_made(run: Run) -> Iterator[str]:
    """Within the staleness bound and in the order of time, the dumped groups fill the batches of all steps."""
    if not (comparable(run) and run.complete and run.rl is not None):
        return
    bound = run.rl.rollout.max_head_offpolicyness
    left = [group for group in run.trained if group.head is not None and group.tail is not None]
    if len(left) != len(run.trained):
        run.unproved.append("the staleness of groups without versions")
        return
    for record in run.steps:
        step, count = record["step"], int(record["train/groups"])
        ready = [g for g in left if (g.tail or 0) < step and g.finished <= record["time"] + SLACK_S]
        batch = sorted(ready, key=lambda group: (group.head, group.finished))[:count]
        late = [group.id for group in batch if (group.head or 0) + bound + 1 < step]
        if late:
            yield f"step {step} must have trained {some(late)}, which is beyond the staleness bound of {bound}"
        if len(batch) < count:
            yield f"step {step} trained {count} groups, and {len(batch)} had ended with versions that existed"
        chosen = {id(group) for group in batch}
        left = [group for group in left if id(group) not in chosen]


# -- one step


class StepRecomputation:
    """Computes the metrics of on-policy steps again from their dumped groups, with the trainer's own functions.

    A step's groups are known only on-policy: there, the step after version ``v`` trains all accepted groups of ``v``.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._algorithm: Any = None
        self._records = {record["step"]: record for record in run.steps}
        self.active = self._is_possible()

    def _is_possible(self) -> bool:
        run, config = self._run, self._run.rl
        if config is None or not comparable(run):
            return False
        if config.rollout.max_head_offpolicyness:
            if not fact_files(run.root):
                run.unproved.append(
                    "rewards and advantages of each step: groups of a version may train in several steps; sums are "
                    "checked. Set dump_training for runs"
                )
            return False
        self._algorithm = self._load_algorithm()
        return True

    def _load_algorithm(self) -> Any:
        """Return the algorithm; None, with the reason noted, if its advantages need more than the dumps have."""
        from areal_lite.trainer.algorithm import Algorithm

        config = self._run.rl
        assert config is not None
        trainer, reason = config.trainer, ""
        if config.reward_model is not None:
            reason = "a reward model replaced the rewards"
        elif trainer.kl is not None and trainer.kl.place == "reward":
            reason = "the KL penalty is part of the rewards"
        else:
            try:
                algorithm = Algorithm(trainer, max_new_tokens=config.rollout.gconfig.max_new_tokens)
                if not (needs := algorithm.needs - {"turns"}):
                    return algorithm
                reason = f"{trainer.advantage} needs {', '.join(sorted(needs))}, which are not written"
            except ArealLiteError as error:
                reason = str(error)
        if not fact_files(self._run.root):
            self._run.unproved.append(f"advantages: {reason}. Set dump_training for runs")
        return None

    def check(self, version: int, groups: Sequence[DumpedGroup]) -> Iterator[str]:
        """Compare the step that trained ``version`` with the accepted training groups of that version."""
        record = self._records.get(version + 1)
        # A resumed run numbers its groups after those of the lost steps.
        count = 0 if record is None else int(record["train/groups"])
        kept = sorted(groups, key=lambda group: (isinstance(group.task, str), group.task))[-count:] if count else []
        if len(kept) < len(groups):
            if self._run.complete:
                yield f"step {version + 1}: {len(groups)} groups of its version were accepted, and it trained {count}"
            else:
                self._run.unproved.append(
                    f"{len(groups) - len(kept)} accepted groups of version {version} belong to no recorded step: the "
                    "run was stopped or resumed there"
                )
        if record is None or not kept:
            return
        try:
            found = self._metrics(version, kept)
        except (ArealLiteError, ValueError, KeyError, TypeError) as error:
            yield f"step {version + 1} cannot be computed again from its episodes: {type(error).__name__}: {error}"
            return
        for name, value in found.items():
            if f"train/{name}" in record and differs(record[f"train/{name}"], value):
                yield f"step {version + 1}: {name} is {record[f'train/{name}']}, and {value} by its dumped episodes"

    def _metrics(self, version: int, groups: Sequence[DumpedGroup]) -> dict[str, float]:
        import torch

        from areal_lite.trainer.policy_step import Step

        assert self._run.rl is not None
        step = Step.of([group_of(group) for group in groups], version=version, device=torch.device("cpu"))
        skipped: tuple[str, ...] = ()
        if self._algorithm is not None:
            self._algorithm.shape_rewards(step.scores, step.tokens)
            turns = step.turns() if "turns" in self._algorithm.needs else None
            self._algorithm.advantages(step.tokens, step.scores, None, step.group_ids, turns)
        else:
            skipped = ("advantage", "reward") if self._run.rl.reward_model is not None else ("advantage",)
        found = step_metrics(step, self._records[version + 1], self._run.rl)
        return {name: value for name, value in found.items() if not name.startswith(skipped)}


def step_metrics(step: Any, record: Record, config: RunConfig) -> dict[str, float]:
    """Return the metrics of a step that follow from its sequences and advantages."""
    from areal_lite.trainer.data_metrics import batch_metrics

    tokens = step.tokens
    found = batch_metrics(
        step.sequences,
        step.episodes,
        tokens.advantages.numpy(),
        version=step.version,
        max_new_tokens=config.rollout.gconfig.max_new_tokens,
    )
    found["trained_tokens"] = float(len(tokens.behaviour))
    fresh = bool((tokens.versions == step.version).all()) and not bool(tokens.behaviour.isnan().any())
    if record.get("train/computed_tokens") == found["trained_tokens"] and fresh:
        sums = np.zeros(len(step.scores))
        np.subtract.at(sums, tokens.episodes.numpy(), tokens.behaviour.double().numpy())
        counts = np.bincount(tokens.episodes.numpy(), minlength=len(sums))
        means = sums[counts > 0] / counts[counts > 0]
        found["engine_mismatch/behaviour_perplexity"] = float(np.exp(means).mean())
    return found


def group_of(group: DumpedGroup) -> Group:
    """Return the accepted part of a dumped group as the trainer had it."""
    trajectories = [
        Trajectory(member_idx=member, status=EpisodeStatus.ACCEPTED, sequences=[_sequence(r) for r in records])
        for member, records in itertools.groupby(
            (record for record in group.records if record["status"] == "accepted"), lambda record: record["member_idx"]
        )
    ]
    return Group(
        task_id=group.task,
        group_id=str(group.records[0]["group_id"]),
        status=EpisodeStatus.ACCEPTED,
        data={},
        trajectories=trajectories,
    )


def _sequence(record: Record) -> TokenSequence:
    turns = record["turns"]

    def column(name: str, missing: float, dtype: type) -> Any:
        parts: list[Any] = [np.array(turn.get(name) or [missing] * len(turn["ids"]), dtype) for turn in turns]
        return np.concatenate(parts)

    path = tuple(turn.get("turn_idx", place) for place, turn in enumerate(turns))
    calls = sum(turn["role"] == "assistant" for turn in turns)
    return TokenSequence(
        input_ids=column("ids", 0, np.int32),
        loss_mask=column("loss_mask", 0, np.bool_),
        logprobs=column("logprobs", 0.0, np.float32),
        versions=column("versions", -1, np.int32),
        reward=record["reward"],
        place=(path, max(0, calls - 1)),
    )


METRICS_CHECKS: dict[str, RunCheck] = {
    "steps": steps_are_whole,
    "engine mismatch": servers_had_the_weights,
    "skipped updates": updates_are_recorded,
    "staleness": staleness_is_within_the_bound,
    "ended once": groups_ended_once,
    "dumps and metrics": steps_match_dumps,
    "evaluations": evaluations_match_dumps,
    "batches": batches_can_be_made,
}
