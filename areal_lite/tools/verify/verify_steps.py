"""Checks of the steps: dumps against metrics.jsonl and their writer's chains, steps computed again, staleness."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any
import orjson
from areal_lite.api.trajectory import Group
from areal_lite.config.run_config import RunConfig
from areal_lite.errors import ArealLiteError
from areal_lite.rollout.dumps.dump_lines import CHAIN
from areal_lite.runs.folder.run_directory import BATCHES
from areal_lite.tools.foreign_files import read_lines, read_records
from areal_lite.tools.inspect.training_facts import fact_files
from areal_lite.tools.replay.dump_reader import TrainedBatches
from areal_lite.tools.verify.verify_run import EVALUATION, SLACK_S, Record, Run, began, differs, some

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
            cause = "a server had other weights, or samples in another way"
            yield f"step {record['step']}: log-probs of servers and trainer differ by {mean} nats on average: {cause}"


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
    ids = {task for task in counts if isinstance(task, int) and task >= 0}
    if missing := max(ids, default=-1) + 1 - len(ids):  # may be any number, so only the first ones are listed
        if run.complete:
            first = itertools.islice((task for task in itertools.count() if task not in ids), min(missing, 8))
            named = ", ".join(map(str, first)) + (f" and {missing - 8} more" if missing > 8 else "")
            yield f"the tasks {named} are missing: {missing} groups never ended, or their dumps are gone"
        else:
            cause = f"{missing} task ids are missing, as a run that was killed or runs has them"
            run.unproved.append(f"that each group ended: {cause}")
    if run.restarted:
        return  # a resumed run may train the calls of a lost step again
    seen: dict[str, str] = {}
    for group in run.trained:
        for call in group.calls:
            if seen.setdefault(call, group.id) != group.id:
                yield f"{group.id} has a model call of {seen[call]}: it is a copy"
                break


def dumps_are_as_written(run: Run) -> Iterator[str]:
    """Dumps have the hashes that their writers noted, and each note has that of the note before it."""
    dumps, noted = {group.file for group in run.groups}, dict[str, str]()
    for folder in sorted({file.rpartition("/")[0] for file in dumps}):
        for chain in sorted((run.root / folder).glob(f"{CHAIN}*")):
            previous = b""
            for number, line in enumerate(read_lines(chain, run.root), 1):
                if not line.endswith(b"\n"):
                    break  # the writer was killed, or its disk was full
                note = orjson.loads(line)
                if note["previous"] != sha256(previous).hexdigest():
                    yield f"{folder}/{chain.name}:{number}: the notes before it were changed"
                noted[f"{folder}/{note['file']}"], previous = note["sha256"], line
    for file, wanted in noted.items():
        digest = sha256()
        try:
            for line in read_lines(run.root / file, run.root):
                digest.update(line)
            if digest.hexdigest() != wanted:
                yield f"{file} was changed after it was written"
        except FileNotFoundError:
            yield f"{file} was removed after it was written"
    if unnoted := dumps - noted.keys():
        cause = f"in no chain, as those of an older version, of a copy without {CHAIN}* and of a writer that was killed"
        run.unproved.append(f"that {len(unnoted)} of {len(dumps)} dumps are as they were written: they are {cause}")


# -- dumps against metrics


def steps_match_dumps(run: Run) -> Iterator[str]:
    """Sequences, groups, tokens and rewards of the dumps sum to those of metrics.jsonl."""
    if (config := comparable(run)) is None:
        return
    trained = [group for group in run.trained if group.finished >= run.first_moment]
    if len(run.trained) > len(trained):
        run.unproved.append(f"{len(run.trained) - len(trained)} groups are of an earlier start, which was lost")
    rewards = [reward for group in trained for reward in group.rewards]
    lines, tokens = sum(len(group.lines) for group in trained), sum(group.trained for group in trained)
    found = {"groups": len(trained), "sequences": lines, "trained_tokens": tokens, "episodes": len(rewards)}
    expected = {name: sum(record.get(f"train/{name}") or 0 for record in run.steps) for name in found}
    for name, count in found.items():
        if count < expected[name] or (count > expected[name] and run.complete):
            yield f"metrics.jsonl has {expected[name]:g} {name} over all steps, and the dumps have {count}"
    if config.reward_model is None and found == expected:
        mean = math.fsum(rewards) / max(1, len(rewards))
        sums = ((record.get("train/reward_mean") or 0) * record["train/episodes"] for record in run.steps)
        wanted = math.fsum(sums) / max(1, len(rewards))
        if differs(mean, wanted):
            yield f"the mean reward over all steps is {wanted:.6f}, and {mean:.6f} in the dumps"


def comparable(run: Run) -> RunConfig | None:
    """Return the config if dumps and metrics describe the same sequences, otherwise None."""
    config = run.rl
    if config is None or not config.rollout.dump_to_file or config.data_packer or config.rollout_cache:
        return None
    return config if run.steps and "train/groups" in run.steps[0] else None


def evaluations_match_dumps(run: Run) -> Iterator[str]:
    """Rewards and counts of each evaluation are those of the held-out episodes dumped in its time."""
    if run.rl is None or not run.rl.rollout.dump_to_file:
        return
    evaluated = [group for group in run.groups if group.scope == EVALUATION]
    for record in (each for each in run.metrics if "eval/episodes" in each):
        # The time is rounded to 1 ms; greedy baselines of the next step follow at once.
        first, last = began(record) - SLACK_S, record["time"] + 0.001
        groups = [each for each in evaluated if each.start == record["step"] and first <= each.finished <= last]
        rewards = [reward for group in groups for reward in group.rewards]
        failed = sum(not group.lines for group in groups)
        where = f"the evaluation after step {record['step']}"
        if (len(rewards), failed) != (record["eval/episodes"], record["eval/failed"]):
            noted = f"{record['eval/episodes']:g} episodes and {record['eval/failed']:g} failed"
            yield f"{where} has {noted}, and the dumps have {len(rewards)} and {failed}"
        elif rewards and differs(record["eval/reward"], mean := math.fsum(rewards) / len(rewards)):
            yield f"{where} has the reward {record['eval/reward']}, and its episodes have {mean}"
        for group in groups:
            if group.tail is not None and (group.head, group.tail) != (record["step"], record["step"]):
                yield f"{where}: {group.id} was sampled by the versions {group.head} to {group.tail}"


def batches_can_be_made(run: Run) -> Iterator[str]:
    """Within the staleness bound and in the order of time, the dumped groups fill the batches of all steps."""
    if (config := comparable(run)) is None or not run.complete:
        return
    bound = config.rollout.max_head_offpolicyness
    left = [group for group in run.trained if group.head is not None and group.tail is not None]
    if len(left) != len(run.trained):
        run.unproved.append("the staleness of groups without versions")
        return
    for record in run.steps:
        step, count = record["step"], int(record["train/groups"])
        ready = [g for g in left if (g.tail or 0) < step and g.finished <= record["time"] + SLACK_S]
        batch = sorted(ready, key=lambda group: (group.head, group.finished))[:count]
        if late := [group.id for group in batch if (group.head or 0) + bound + 1 < step]:
            yield f"step {step} must have trained {some(late)}, which is beyond the staleness bound of {bound}"
        if len(batch) < count:
            yield f"step {step} trained {count} groups, and {len(batch)} had ended with versions that existed"
        chosen = {id(group) for group in batch}
        left = [group for group in left if id(group) not in chosen]


# -- one step


def steps_fit_their_groups(run: Run) -> Iterator[str]:
    """The metrics of a step follow from its groups, and each group trains in one step."""
    if (config := comparable(run)) is None:
        return
    try:
        batches = _batches(run, config)
    except ArealLiteError as error:
        yield str(error)
        return
    if batches is None:
        return
    algorithm = _algorithm(run, config, have_baselines=batches.have_baselines)
    trained: dict[str, int] = {}
    for record in run.steps:
        step = record["step"]
        if step > len(batches):
            yield f"step {step} is not in {BATCHES}"
            continue
        for task in map(str, batches.records[step - 1]["task_ids"]):
            if (before := trained.setdefault(task, step)) != step:
                yield f"step {step} trained task {task}, which step {before} trained"
        try:
            found = _recomputed(record, batches.groups(step), algorithm, config)
        except (ArealLiteError, ValueError, KeyError, TypeError) as error:
            yield f"step {step} cannot be computed again from its episodes: {type(error).__name__}: {error}"
            continue
        for name, value in found.items():
            if f"train/{name}" in record and differs(record[f"train/{name}"], value):
                yield f"step {step}: {name} is {record[f'train/{name}']}, and {value} by its dumped episodes"
    if left := [group.id for group in run.trained if str(group.task) not in trained]:
        text = f"{len(left)} accepted groups belong to no recorded step: {some(left)}"
        if run.complete:
            yield text
        else:
            run.unproved.append(f"{text}; the run was stopped or resumed there")


def _batches(run: Run, config: RunConfig) -> TrainedBatches | None:
    """Return the groups of each step; None, with the reason noted, if they are unknown."""
    if (run.root / BATCHES).is_file():
        return TrainedBatches.open(run.root, max_staleness=config.rollout.max_head_offpolicyness)
    if not fact_files(run.root):
        run.unproved.append(f"rewards and advantages of each step: there is no {BATCHES}; sums are checked")
    return None


def _algorithm(run: Run, config: RunConfig, *, have_baselines: bool) -> Any:
    """Return the algorithm; None, with the reason noted, if its advantages need more than the dumps have."""
    trainer, reason = config.trainer, ""
    if config.reward_model is not None:
        reason = "a reward model replaced the rewards"
    elif trainer.kl is not None and trainer.kl.place != "loss":
        reason = f"the KL penalty is part of each {trainer.kl.place}"
    else:
        try:
            algorithm = algorithm_of(config)
            if not (needs := algorithm.needs - {"turns", "baselines" if have_baselines else ""}):
                return algorithm
            reason = f"{trainer.advantage} needs {', '.join(sorted(needs))}, which are not written"
        except ArealLiteError as error:
            reason = str(error)
    if not fact_files(run.root):
        run.unproved.append(f"advantages: {reason}. Set dump_training for runs")
    return None


def algorithm_of(config: RunConfig) -> Any:
    from areal_lite.trainer.rl.algorithm import Algorithm

    return Algorithm(config.trainer, max_new_tokens=config.rollout.gconfig.max_new_tokens)


def _recomputed(record: Record, groups: Sequence[Group], algorithm: Any, config: RunConfig) -> dict[str, float]:
    import torch
    from areal_lite.trainer.rl.policy_step import Step

    step = Step.of(groups, version=record["step"] - 1, device=torch.device("cpu"))
    skipped: tuple[str, ...] = ()
    if algorithm is not None:
        algorithm.shape_rewards(step.scores, step.tokens)
        fill_advantages(step, algorithm)
    else:
        skipped = ("advantage", "reward") if config.reward_model is not None else ("advantage",)
    return {name: value for name, value in step_metrics(step, record, config).items() if not name.startswith(skipped)}


def fill_advantages(step: Any, algorithm: Any) -> None:
    """Compute the advantages of a step's tokens as the trainer does."""
    turns = step.turns() if "turns" in algorithm.needs else None
    algorithm.advantages(step.tokens, step.scores, step.baselines, step.group_ids, turns)


def step_metrics(step: Any, record: Record, config: RunConfig) -> dict[str, float]:
    """Return the metrics of a step that follow from its sequences and advantages."""
    import torch
    from areal_lite.trainer.rl.data_metrics import batch_metrics, mismatch_statistics

    tokens, limit = step.tokens, config.rollout.gconfig.max_new_tokens
    columns = {"advantage": tokens.advantages.numpy()}
    found = batch_metrics(step.sequences, step.episodes, columns, version=step.version, max_new_tokens=limit)
    found["trained_tokens"] = float(len(tokens.behaviour))
    computed = record.get("train/computed_tokens")
    own = ~tokens.behaviour.isnan()
    # The trainer does not compute episodes without an advantage, if nothing else gives them a gradient.
    with_gradient = torch.isin(tokens.episodes, tokens.episodes[tokens.advantages != 0])
    if computed != found["trained_tokens"]:
        own &= with_gradient
    if computed in (found["trained_tokens"], float(with_gradient.sum())):
        behaviour, versions, episodes = tokens.behaviour[own], tokens.versions[own], tokens.episodes[own]
        statistics = mismatch_statistics(behaviour, behaviour, versions, episodes, step.version)
        found |= {name: value for name, value in statistics.items() if name.endswith("/behaviour_perplexity")}
    return found


METRICS_CHECKS: dict[str, Callable[[Run], Iterator[str]]] = {
    "steps": steps_are_whole,
    "engine mismatch": servers_had_the_weights,
    "skipped updates": updates_are_recorded,
    "staleness": staleness_is_within_the_bound,
    "ended once": groups_ended_once,
    "chain": dumps_are_as_written,
    "dumps and metrics": steps_match_dumps,
    "evaluations": evaluations_match_dumps,
    "batches": batches_can_be_made,
    "step": steps_fit_their_groups,
}
