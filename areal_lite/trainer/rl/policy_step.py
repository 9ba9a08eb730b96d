"""The state of one reinforcement-learning step, passed from stage to stage, and its metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
import torch
from torch import Tensor
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.training_batch import training_sequences
from areal_lite.errors import TrainingError
from areal_lite.models.parallel.ranks import Ranks, gather_json
from areal_lite.trainer.estimators.inputs import Grouping, Turns
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.data_metrics import PhaseClock, batch_metrics, mismatch_statistics
from areal_lite.trainer.rl.step_tokens import StepTokens, by_episode

Batch = Sequence[Group] | DataProto  # training data of one step
ROUNDING = 1e-3  # a log-prob may be above 0 by this much, because engines round


@dataclass(slots=True)
class Step:
    """One batch and what the stages compute from it."""

    sequences: list[TokenSequence]  # sequences of one episode are adjacent
    episodes: list[int]  # the episode of each sequence
    version: int
    tokens: StepTokens
    scores: Tensor  # ``[E]`` reward of each episode
    clock: PhaseClock
    baselines: Tensor | None = None  # ``[E]`` reward of a greedy episode on the same row
    minibatches: list[list[int]] = field(default_factory=list)  # sequences of each update
    metrics: dict[str, float] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)  # ``[T]`` what the losses recorded per token, or NaN
    choice: Tensor | None = None  # ``[T]`` bool, tokens that the loss chose in the current minibatch, if it chooses

    @classmethod
    def of(cls, batch: Batch, *, version: int, device: torch.device) -> "Step":
        """Return the step of accepted groups or a DataProto, whose numbers must be finite; a log-prob may be NaN."""
        clock = PhaseClock(device)
        if isinstance(batch, DataProto):
            _check_proto(batch, version)
        sequences, episodes = by_episode(training_sequences(batch))
        if not sequences:
            raise TrainingError(
                f"step {version}: no group of the batch was accepted, so nothing can train: the dump has the reasons"
            )
        rewards = torch.tensor([sequence.score for sequence in sequences])
        scores = Grouping.numbered(torch.tensor(episodes)).means(rewards).float()
        _refuse("rewards", (~rewards.isfinite()).nonzero()[:, 0], _task_ids(sequences), version, _FINITE_EPISODES)
        step = cls(
            sequences=sequences,
            episodes=episodes,
            version=version,
            tokens=StepTokens.of(sequences, episodes, device=device),
            scores=scores.to(device),
            clock=clock,
        )
        as_a_whole = torch.ones_like(step.scores, dtype=torch.bool)
        as_a_whole[[e for e, s in zip(episodes, sequences, strict=True) if s.token_rewards is not None]] = False
        ends = step.tokens.ends & as_a_whole[step.tokens.episodes]
        step.tokens.rewards[ends] = step.scores[step.tokens.episodes[ends]]
        step.check_sampled()
        if (baselines := _baselines(batch)) is not None:
            step.baselines = torch.tensor([baselines[name] for name in step.group_ids], device=device)
            broken = (~step.baselines.isfinite()).nonzero()[:, 0]
            _refuse("baselines", broken, step.group_ids, version, _FINITE_EPISODES)
        return step

    @property
    def group_ids(self) -> list[str]:
        """``[E]`` the group of each episode."""
        return list(dict(zip(self.episodes, (s.group_id for s in self.sequences), strict=True)).values())

    @property
    def all_indices(self) -> range:
        return range(len(self.sequences))

    def turns(self) -> Turns:
        """Return the rewards per turn; each sequence is a rewarded turn."""
        device = self.scores.device
        return Turns(
            of_token=self.tokens.sequences,
            rewards=torch.tensor([sequence.reward for sequence in self.sequences], device=device),
            episodes=torch.tensor(self.episodes, device=device),
            index=torch.tensor([sequence.turn_idx for sequence in self.sequences], device=device),
            parents=torch.tensor(self._parents(), device=device),
        )

    def _parents(self) -> list[int]:
        """Return, per sequence, the longest sequence of its episode that it extends; -1 for none."""
        paths = [(episode, s.path) for episode, s in zip(self.episodes, self.sequences, strict=True)]
        indices = {path: index for index, path in enumerate(paths)}
        parents = []
        for episode, path in paths:
            shorter = (indices.get((episode, path[:length])) for length in range(len(path) - 1, 0, -1))
            parents.append(next((index for index in shorter if index is not None), -1))
        return parents

    def check_sampled(self) -> None:
        """Check the log-probs and versions that the engine recorded for the trained tokens."""
        logprobs, versions, of_token = self.tokens.behaviour, self.tokens.versions, self.tokens.sequences
        task_ids = _task_ids(self.sequences)
        _refuse("logprobs", of_token[logprobs.isinf()], task_ids, self.version, _FINITE_EPISODES)
        for name, values, highest, fix in (
            ("logprobs", logprobs, 0, "record the natural log of each sampled token's probability"),
            ("versions", versions, self.version, "record those that the server reported, and train with its version"),
        ):
            broken = values > highest + ROUNDING
            if bool(broken.any()):
                rule = f"must be at most {highest} and reach {values[broken].max():g}: {fix}"
                _refuse(name, of_token[broken], task_ids, self.version, rule)

    def check_finite(self, *names: str) -> None:
        """Check that the per-token values of these ``names`` are finite."""
        rule = (
            "must be finite and are not: the model has diverged on them: resume from an earlier checkpoint with a "
            "lower learning rate"
        )
        for name in names:
            broken = ~getattr(self.tokens, name).isfinite()
            _refuse(name, self.tokens.sequences[broken], _task_ids(self.sequences), self.version, rule)

    def record_statistics(self, at: Tensor, statistics: Mapping[str, Tensor]) -> None:
        for name, values in statistics.items():
            column = self.statistics.setdefault(name, torch.full_like(self.tokens.proximal, math.nan))
            column[at] = values.detach().float()

    def share(self, ranks: Ranks) -> None:
        """Give every rank the per-token values that another one computed; metrics and facts are then the same on each.
        All ranks call it together, once, after the updates: a second call would add shared values up."""
        tokens, nothing = self.tokens, torch.full_like(self.tokens.proximal, math.nan)

        def shared(values: Tensor, own: Tensor) -> Tensor:
            return torch.where(ranks.sum_(own.float()) > 0, ranks.sum_(torch.where(own, values, 0.0)), values)

        # What this rank scored; a step that trains nothing measures its tokens without an update.
        scored = tokens.computed | ~self.statistics.get("entropy", nothing).isnan()
        for name in ("policy", "proximal", "correction", "log_kept"):
            setattr(tokens, name, shared(getattr(tokens, name), scored))
        tokens.computed = ranks.sum_(tokens.computed.float()) > 0
        # A rank that computed nothing has no statistics of its own.
        for name in dict.fromkeys(name for names in gather_json(list(self.statistics)) for name in names):
            values = self.statistics.get(name, nothing)
            self.statistics[name] = shared(values, ~values.isnan())

    def all_metrics(self, algorithm: Algorithm) -> dict[str, float]:
        tokens, config = self.tokens, algorithm.config
        earned = torch.zeros_like(self.scores).index_add_(0, tokens.episodes, tokens.rewards)
        earned = torch.where(torch.bincount(tokens.episodes, minlength=len(earned)) > 0, earned, self.scores)
        recorded = {name: values[~values.isnan()] for name, values in self.statistics.items()}
        columns = {"advantage": tokens.advantages}
        if config.critic is not None:
            columns |= {"return": tokens.returns, "value": tokens.values}
        return {
            **batch_metrics(
                self.sequences,
                self.episodes,
                {name: column.cpu().numpy() for name, column in columns.items()},
                version=self.version,
                penalised_rewards=earned.cpu().numpy() if algorithm.kl_place == "reward" else None,
                max_new_tokens=algorithm.max_new_tokens,
            ),
            **self.metrics,
            **{name: (values.sum() / max(1, len(values))).item() for name, values in recorded.items()},
            "trained_tokens": float(len(tokens.computed)),
            "computed_tokens": float(tokens.computed.sum()),
            "rejected_tokens": float((tokens.computed & (tokens.correction == 0)).sum()),
            **(self._engine_metrics() if config.proximal == "trainer" else {}),
            **self.clock.metrics(num_tokens=sum(map(len, self.sequences))),
        }

    def _engine_metrics(self) -> dict[str, float]:
        tokens = self.tokens
        scored = ~self.statistics.get("entropy", torch.full_like(tokens.proximal, math.nan)).isnan()
        recorded = ~tokens.behaviour.isnan() & scored
        return mismatch_statistics(
            (tokens.proximal + tokens.log_kept)[recorded],
            tokens.behaviour[recorded],
            tokens.versions[recorded],
            tokens.episodes[recorded],
            self.version,
        )


def _baselines(batch: Batch) -> dict[str, float] | None:
    """Return the reward of a greedy episode by group; None unless every group has one."""
    if not isinstance(batch, DataProto):
        baselines = {g.group_id: g.baseline for g in batch if g.status is EpisodeStatus.ACCEPTED}
        known = {name: baseline for name, baseline in baselines.items() if baseline is not None}
        return known if len(known) == len(baselines) else None
    if "baselines" not in batch.batch:
        return None
    return dict(zip(batch.non_tensor_batch["group_ids"], batch.batch["baselines"].tolist(), strict=True))


_FINITE_EPISODES = (
    "must be finite and are not: fail the episode if its reward or a log-prob of the engine is NaN or inf"
)


def _check_proto(batch: DataProto, version: int) -> None:
    """Raise for non-finite numbers, naming tasks; :func:`check_training_batch` would name sequences."""
    task_ids = list(batch.non_tensor_batch.get("task_ids", range(len(batch))))
    for key in ("rewards", "baselines", "logprobs"):
        if key in batch.batch:
            column = batch.batch[key]
            broken = column.isinf() if key == "logprobs" else ~column.isfinite()
            _refuse(key, broken.nonzero()[:, 0], task_ids, version, _FINITE_EPISODES)


def _task_ids(sequences: Sequence[TokenSequence]) -> list[str]:
    return [sequence.task_id for sequence in sequences]


def _refuse(name: str, indices: Tensor, task_ids: Sequence[object], version: int, rule: str) -> None:
    """Raise a TrainingError naming the tasks at ``indices``, where ``name`` breaks ``rule``, if there are any."""
    tasks = list(dict.fromkeys(str(task_ids[index]) for index in sorted(set(indices.tolist()))))
    if tasks:
        more = f" and {len(tasks) - 8} more" if len(tasks) > 8 else ""
        raise TrainingError(f"step {version}: {name} of task {', '.join(tasks[:8])}{more} {rule}")
