"""Evaluation: the rewards of the held-out rows under one policy version, and their statistics as verl has them."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
import numpy as np
from numpy.typing import NDArray
from areal_lite.api.engine_api import Row
from areal_lite.api.trajectory import EpisodeStatus, Group
from areal_lite.config.run_config import RunConfig
from areal_lite.errors import EpisodeError
from areal_lite.rollout.episodes.ended_groups import PASSING, advice
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.run_data import WorkflowChoice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Rewards on the held-out rows."""

    reward: float  # mean over all episodes that gave one
    episodes: int
    failed: int  # rows whose group was not accepted
    seconds: float
    others: dict[str, float] = field(default_factory=dict)  # what episodes recorded, and :func:`validation_metrics`

    def metrics(self) -> dict[str, float]:
        own = {name: float(getattr(self, name)) for name in ("reward", "episodes", "failed", "seconds")}
        return self.others | {f"eval/{name}": value for name, value in own.items()}


def evaluate(engine: RemoteInfEngine, config: RunConfig, rows: Sequence[Row], workflow: WorkflowChoice) -> Evaluation:
    """Run the workflow on each of the rows, ``evaluation.group_size`` times; return once the groups are dumped."""
    logger.info("evaluating %d held-out rows", len(rows))
    clock = time.monotonic()
    groups = engine.rollout_batch(
        rows,
        workflow.workflow,
        workflow.kwargs(config, config.rollout.eval_gconfig),
        group_size=config.evaluation.group_size,
        is_eval=True,
    )
    engine.flush_dumps()  # a run killed after the record of an evaluation has its episodes
    rewards = [reward for group in groups for reward in group.rewards]
    failed = [group for group in groups if group.status is not EpisodeStatus.ACCEPTED]
    if not rewards:
        raise no_success(failed)
    return Evaluation(
        reward=sum(rewards) / len(rewards),
        episodes=len(rewards),
        failed=len(failed),
        seconds=time.monotonic() - clock,
        others=engine.take_scalars(is_eval=True) | _by_data_source(groups, config.evaluation.group_size),
    )


def no_success(groups: Sequence[Group]) -> EpisodeError:
    causes = Counter(group.failure.summary if group.failure else group.rejection for group in groups)
    text = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
    if fix := advice(group.rejection for group in groups if group.rejection):
        text += f": {fix}"
    kinds = {group.failure.kind for group in groups if group.failure is not None}
    may_pass = bool(kinds) and kinds <= PASSING
    return EpisodeError(f"no episode on the {len(groups)} rows gave a reward: {text}", may_pass=may_pass)


def _by_data_source(groups: Sequence[Group], group_size: int) -> dict[str, float]:
    """Return mean@N, best@N, worst@N of each data source, and maj@N if all rewards have a ``pred`` beside them; nothing
    if that is the mean reward alone."""
    judged = [
        (trajectory.reward, str(place), str(group.data.get("data_source", "held_out")), trajectory.reward_extra)
        for place, group in enumerate(groups)
        for trajectory in group.trajectories
        if trajectory.sequences and trajectory.reward is not None
    ]
    rewards, places, sources, facts = zip(*judged, strict=True)
    if group_size == 1 and set(sources) == {"held_out"}:
        return {}
    named = [each["pred"] for each in facts if each.get("pred") is not None]
    votes = named if len(named) == len(facts) else None
    figures = validation_metrics({"reward": rewards}, prompt_ids=places, data_sources=sources, predictions=votes)
    return {f"eval/{name}": value for name, value in figures.items()}


def validation_metrics(
    scores: Mapping[str, Sequence[float]],
    *,
    prompt_ids: Sequence[str],
    data_sources: Sequence[str],
    predictions: Sequence[str] | None = None,
) -> dict[str, float]:
    """Return ``{source}/{score}/{metric}``, averaged over the prompts of each data source.

    With N answers to a prompt the metrics are ``mean@N`` and ``std@N`` and, for n = 2, 4, 8, ... below N and for N
    itself, ``best@n/mean``, ``worst@n/mean`` and ``maj@n/mean`` with their ``std``: the best and the worst of n
    answers, and the first answer with the most common prediction (in a tie the prediction that came first). They are
    estimated by resampling with replacement, equally in every call. One answer has only ``mean@1``.

    Args:
        scores: ``[B]`` scores by name, such as ``reward``.
        prompt_ids: ``[B]`` answers of one data source with the same id belong to the same prompt.
        data_sources: ``[B]`` data source of each answer.
        predictions: ``[B]`` the prediction extracted from each answer; None omits maj@n.

    Source: the bootstrap of verl's validation."""
    columns = {"prompt_ids": prompt_ids, **scores, **({} if predictions is None else {"predictions": predictions})}
    for name, column in columns.items():
        if len(column) != len(data_sources):
            raise ValueError(
                f"{name} has {len(column)} entries for {len(data_sources)} answers: give one per answer, in one order"
            )
    prompts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, prompt in enumerate(zip(data_sources, prompt_ids, strict=True)):
        prompts[prompt].append(index)
    metrics: dict[str, list[float]] = defaultdict(list)
    arrays = {name: np.array(column, np.float64) for name, column in scores.items()}
    votes = None if predictions is None else np.unique(np.array(predictions, str), return_inverse=True)[1]
    for (source, _), own in prompts.items():
        for name, array in arrays.items():
            for metric, number in _prompt_metrics(array[own], None if votes is None else votes[own]):
                metrics[f"{source}/{name}/{metric}"].append(number)
    return {name: float(np.mean(numbers)) for name, numbers in metrics.items()}


def _prompt_metrics(scores: NDArray[np.float64], votes: NDArray[np.int64] | None) -> Iterator[tuple[str, float]]:
    count = len(scores)
    yield f"mean@{count}", scores.mean()
    if count == 1:
        return
    yield f"std@{count}", scores.std()
    for size in [*(2**power for power in range(1, (count - 1).bit_length())), count]:
        resamples = _resamples(count, size)
        drawn = scores[resamples]
        metrics = {"best": drawn.max(axis=1), "worst": drawn.min(axis=1)}
        if votes is not None:
            metrics["maj"] = np.take_along_axis(drawn, _first_of_majority(votes[resamples])[:, None], axis=1)
        for name, values in metrics.items():
            yield f"{name}@{size}/mean", values.mean()
            yield f"{name}@{size}/std", values.std()


@lru_cache(maxsize=64)
def _resamples(count: int, size: int) -> NDArray[np.int64]:
    """Return ``[1000, size]`` indices below ``count``, drawn with replacement."""
    return np.random.RandomState(42).randint(0, count, (1000, size))


def _first_of_majority(votes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``[R]``, the index of the first vote for the majority in each line of ``votes [R, n]``."""
    shares = np.zeros(votes.shape, np.int64)
    for vote in np.unique(votes):
        same = votes == vote
        shares += same * same.sum(axis=1, keepdims=True)
    indices: NDArray[np.int64] = shares.argmax(axis=1)
    return indices
