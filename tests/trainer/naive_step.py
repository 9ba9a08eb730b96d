"""One training step written out: transformers, autograd, and loops over episodes, one sequence at a time.

Imports nothing of areal_lite: from rewards and recorded tokens to gradients and new weights, in float64. Configs and
sequences are read by their public attributes. A step also reports how near its numbers came to a threshold (a clip
bound, a rejection bound, a sort), because float32 may fall on the other side there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Weights = dict[str, Tensor]


@dataclass(kw_only=True)
class Sampling:
    """How the engine samples."""

    temperature: float = 1.0
    top_k: int | None = None
    reported: bool = False
    """Whether its log-probs are renormalized over the kept tokens."""
    max_new_tokens: int = 0


@dataclass(kw_only=True)
class Model:
    """A plain transformers model in float64, and its weights under the names of the model that trains."""

    module: nn.Module
    weights: Weights
    trained: Sequence[str]
    lora_scale: float = 0.0

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Return the logits of one sequence."""
        merged: Weights = {}
        for name, weight in self.weights.items():
            if ".base_layer." in name:
                a, b = (self.weights[name.replace("base_layer", f"lora_{side}.default")] for side in "AB")
                merged[name.replace(".base_layer", "")] = weight + self.lora_scale * b @ a
            elif ".lora_" not in name:
                merged[name] = weight
        return functional_call(self.module, merged, (torch.tensor([list(ids)]),)).logits[0]


@dataclass
class Result:
    """What a step leaves behind."""

    losses: list[float] = field(default_factory=list)
    """Of each update of the policy."""
    gradients: list[Weights] = field(default_factory=list)
    """Of each update, after clipping the norm."""
    critic_gradients: list[Weights] = field(default_factory=list)
    kl_coef: float = 0.0
    """For the next step."""
    margin: float = math.inf
    """Distance of the nearest threshold."""


class NaiveStep:
    """One step of the trainer whose config is given; changes the weights of ``policy`` and ``critic``.

    Args:
        batch: Sequences; those of one episode have the same group and ``member_idx``.
        minibatches: Group ids of each update.
        reference: The frozen model of the KL penalty.
        baselines: Reward of a greedy episode by group.
    """

    def __init__(
        self,
        config: Any,
        sampling: Sampling,
        batch: Sequence[Any],
        minibatches: Sequence[set[str]],
        *,
        policy: Model,
        reference: Model,
        critic: Model | None,
        baselines: dict[str, float],
    ) -> None:
        self.config, self.sampling, self.minibatches = config, sampling, minibatches
        self.policy, self.reference, self.critic, self.baselines = policy, reference, critic, baselines
        self.result = Result()
        episodes: dict[Any, Any] = {}
        for place, sequence in enumerate(batch):
            key = place if sequence.member_idx is None else (sequence.group_id, sequence.member_idx)
            episodes.setdefault(key, SimpleNamespace(group=sequence.group_id, sequences=[])).sequences.append(sequence)
        self.episodes = list(episodes.values())

    def run(self) -> Result:
        """Do the step."""
        for episode in self.episodes:
            self.score(episode)
        self.result.kl_coef = self.reward()
        self.correct()
        estimate = globals()[f"_{self.config.advantage}"]
        estimate(self, **self.config.advantage_kwargs)
        self.normalize_advantages()
        self.update_critic()
        if self.config.critic is None or not self.config.critic.updates_before_policy:
            self.update_policy()
        return self.result

    def sure(self, differences: Tensor) -> None:
        """Note how near these differences come to 0, where a decision changes."""
        if differences.numel():
            self.result.margin = min(self.result.margin, differences.detach().abs().min().item())

    # -- log-probs ---------------------------------------------------------------------------------

    def read(self, model: Model, episode: Any, *, truncated: bool = True) -> Any:
        """Return log-probs, entropies, sums of squared probabilities and log of kept mass, one per trained token."""
        columns: list[list[Tensor]] = [[], [], [], []]
        for sequence in episode.sequences:
            ids = sequence.input_ids.tolist()
            places = [place for place, trains in enumerate(sequence.loss_mask) if trains]
            if not places:
                continue
            logits = model(ids)
            for place in places:
                row = torch.log_softmax(logits[place - 1] / self.sampling.temperature, -1)
                kept = torch.ones_like(row, dtype=torch.bool)
                if truncated and self.sampling.top_k is not None:
                    ranked = row.sort(descending=True).values
                    self.sure(ranked[self.sampling.top_k - 1] - ranked[self.sampling.top_k])
                    kept = row >= ranked[self.sampling.top_k - 1]
                    kept[ids[place]] = True
                log_kept = row[kept].logsumexp(0).detach()
                row = torch.log_softmax(row.masked_fill(~kept, -1e30), -1)
                values = row[ids[place]], -(row.exp() * row).sum(), row.exp().square().sum(), log_kept
                for column, value in zip(columns, values, strict=True):
                    column.append(value)
        empty = torch.zeros(0, dtype=torch.float64)
        read = [torch.stack(column) if column else empty for column in columns]
        return SimpleNamespace(**dict(zip(("logprobs", "entropy", "squared", "log_kept"), read, strict=True)))

    @torch.no_grad()
    def score(self, episode: Any) -> None:
        """Fill in what the weights at the start of the step give."""
        config = self.config
        recorded = [
            math.nan if one.logprobs is None else float(one.logprobs[place])
            for one in episode.sequences
            for place, trains in enumerate(one.loss_mask)
            if trains
        ]
        behaviour = torch.tensor(recorded, dtype=torch.float64)
        episode.n = len(recorded)
        episode.tokens_of = [int(one.loss_mask.sum()) for one in episode.sequences]
        own = self.read(self.policy, episode)
        episode.squared = own.squared
        if config.proximal == "behaviour":
            episode.proximal = episode.behaviour = behaviour
        else:
            episode.proximal = own.logprobs
            full = behaviour if self.sampling.reported else behaviour - own.log_kept
            episode.behaviour = torch.where(behaviour.isnan(), own.logprobs, full)
        if config.kl is not None:
            episode.reference = self.read(self.reference, episode, truncated=False).logprobs
        if self.critic is not None:
            episode.values = self.values(episode)

    def values(self, episode: Any) -> Tensor:
        """Return the critic's value before each trained token."""
        assert self.critic is not None
        values = [
            self.critic(one.input_ids.tolist())[place - 1, 0]
            for one in episode.sequences
            for place, trains in enumerate(one.loss_mask)
            if trains
        ]
        return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)

    # -- rewards and corrections ----------------------------------------------------------------------

    def reward(self) -> float:
        """Reward each episode's last token, subtract penalties, and return the next step's KL coefficient."""
        config, kl = self.config, self.config.kl
        means = []
        for episode in self.episodes:
            rewards = [float(one.reward) for one in episode.sequences]
            episode.score = rewards[0] if len(set(rewards)) == 1 else sum(rewards) / len(rewards)
            if config.overlong_buffer:
                start = self.sampling.max_new_tokens - config.overlong_buffer
                episode.score -= min(max((episode.n - start) / config.overlong_buffer, 0.0), 1.0)
            episode.rewards = torch.zeros(episode.n, dtype=torch.float64)
            episode.penalties = torch.zeros_like(episode.rewards)
            if episode.n:
                episode.rewards[-1] = episode.score
            if kl is not None and kl.place == "reward" and episode.n:
                penalty = _kl(episode.proximal, episode.reference, kl.estimator)
                episode.penalties = kl.coef * penalty
                episode.rewards = episode.rewards - episode.penalties
                means.append(penalty.mean().item())
            episode.total = episode.rewards.sum().item() if episode.n else episode.score
        if kl is None or kl.target is None:
            return 0.0 if kl is None else kl.coef
        error = min(max(sum(means) / len(means) / kl.target - 1, -0.2), 0.2)
        return kl.coef * (1 + error * len(self.episodes) / kl.horizon)

    def correct(self) -> None:
        """Weigh each token for being sampled by another policy than the one at the start of the step."""
        config = self.config.correction
        for episode in self.episodes:
            log_ratio = episode.proximal - episode.behaviour
            if config.level == "none":
                weights = torch.ones_like(log_ratio)
            elif config.outside == "mask":
                ratio = log_ratio.exp()
                self.sure(ratio - config.min_weight)
                self.sure(ratio - config.max_weight)
                weights = torch.where((ratio < config.min_weight) | (ratio > config.max_weight), 0.0, ratio)
            else:
                if config.level == "sequence":
                    log_ratio = log_ratio.sum().expand(episode.n)
                weights = log_ratio.clamp(-20, 20).exp().clamp(max=config.max_weight)
            episode.correction = weights
        if config.normalize:
            shares = [1 / episode.n if config.level == "sequence" else 1.0 for episode in self.episodes if episode.n]
            used = [episode for episode in self.episodes if episode.n]
            mean = sum(share * e.correction.sum().item() for share, e in zip(shares, used, strict=True))
            mean /= sum(share * e.n for share, e in zip(shares, used, strict=True))
            for episode in used:
                episode.correction = episode.correction / mean
        for episode in self.episodes:
            if self.config.loss == "gmpo" and config.level != "none" and config.outside == "truncate" and episode.n:
                episode.correction = episode.correction.log().mean().exp().expand(episode.n)
            episode.correction = episode.correction * self.keep(episode)

    def keep(self, episode: Any) -> Tensor:
        """Return 1.0 for tokens within all rejection bounds, else 0.0."""
        keep = torch.ones(episode.n, dtype=torch.float64)
        config = self.config.correction
        if config.reject is None or not episode.n:
            return keep
        for name, bound in zip(config.reject.split(","), config.reject_bounds.split(","), strict=True):
            level, _, kind = name.rpartition("_")
            log_ratio = episode.proximal - episode.behaviour
            per_token = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}[kind]
            reduce = {"seq_sum": Tensor.sum, "seq_mean": Tensor.mean, "seq_max": Tensor.max}.get(level)
            judged = per_token if reduce is None else reduce(per_token).expand(episode.n)
            low, high = map(float, bound.split("_")) if kind == "k1" else (None, float(bound))
            if low is not None:
                judged = judged.exp()
                self.sure(judged - low)
                keep = keep * (judged >= low)
            self.sure(judged - high)
            keep = keep * (judged <= high)
        return keep

    # -- advantages --------------------------------------------------------------------------------

    def groups(self) -> list[list[Any]]:
        """Return the episodes by group."""
        names = dict.fromkeys(episode.group for episode in self.episodes)
        return [[episode for episode in self.episodes if episode.group == name] for name in names]

    def credit(self, episode: Any, advantage: float) -> None:
        """Give all tokens of the episode one advantage."""
        episode.advantages = torch.full((episode.n,), advantage, dtype=torch.float64)

    def whiten(self) -> None:
        """Scale all advantages to mean 0 and deviation 1."""
        mean, scale = _spread(torch.cat([episode.advantages for episode in self.episodes]))
        for episode in self.episodes:
            episode.advantages = (episode.advantages - mean) / scale

    def normalize_advantages(self) -> None:
        """Subtract means and divide by deviations over the tokens of a group or of the batch."""
        sets = {"group": self.groups(), "batch": [self.episodes]}
        shifts, scales = [0.0] * len(self.episodes), [1.0] * len(self.episodes)
        number = {id(episode): place for place, episode in enumerate(self.episodes)}
        for level, members in ((level, members) for level in sets for members in sets[level]):
            mean, scale = _spread(torch.cat([episode.advantages for episode in members]))
            for episode in members:
                if self.config.advantage_mean == level:
                    shifts[number[id(episode)]] = mean
                if self.config.advantage_std == level:
                    scales[number[id(episode)]] = scale
        for episode, shift, scale in zip(self.episodes, shifts, scales, strict=True):
            episode.advantages = (episode.advantages - shift) / scale

    # -- updates -----------------------------------------------------------------------------------

    def update_critic(self) -> None:
        """Fit the critic's values to the returns."""
        if (critic := self.critic) is None:
            return
        optimizer = AdamW(self.config.critic, critic)
        clip = self.config.critic.clip_eps
        for members in self.members():
            loss = torch.zeros((), dtype=torch.float64)
            for episode in members:
                values = self.values(episode)
                moved = values - episode.values
                errors = (values - episode.returns) ** 2
                clipped = (episode.values + moved.clamp(-clip, clip) - episode.returns) ** 2
                outside = moved.detach().abs() > clip
                self.sure(moved.abs() - clip)
                self.sure((clipped - errors)[outside])
                worse = torch.where(outside & (clipped > errors), clipped, errors)
                loss = loss + (worse / 2).sum()
            self.result.critic_gradients.append(optimizer.step(loss / sum(e.n for e in members)))

    def update_policy(self) -> None:
        """Train the policy."""
        optimizer = AdamW(self.config, self.policy)
        for members in self.members():
            for episode in members:
                read = self.read(self.policy, episode)
                episode.policy, episode.entropy = read.logprobs, read.entropy
            losses = globals()[f"_loss_{self.config.loss}"](self, members, **self.config.loss_kwargs)
            loss = torch.zeros((), dtype=torch.float64)
            for episode, of_tokens in zip(members, losses, strict=True):
                loss = loss + (self.weight(episode, members) * self.whole_loss(episode, of_tokens)).sum()
            self.result.losses.append(loss.item())
            self.result.gradients.append(optimizer.step(loss))

    def members(self) -> list[list[Any]]:
        """Return the episodes with a trained token, by update."""
        return [[e for e in self.episodes if e.group in names and e.n] for names in self.minibatches]

    def weight(self, episode: Any, members: Sequence[Any]) -> float:
        """Return the weight of each of the episode's tokens in the update's loss."""
        mode = self.config.loss_aggregation
        if mode is None:
            mode = "seq-mean-token-mean" if self.config.loss in ("gspo", "gmpo", "sapo") else "token-mean"
        return {
            "token-mean": 1 / sum(one.n for one in members),
            "seq-mean-token-sum": 1 / len(members),
            "seq-mean-token-mean": 1 / (episode.n * len(members)),
            "seq-mean-token-sum-norm": 1 / (self.config.loss_scale or math.nan),
        }[mode]

    def whole_loss(self, episode: Any, losses: Tensor) -> Tensor:
        """Return corrected losses plus the KL penalty minus the entropy bonus."""
        config, kl = self.config, self.config.kl
        policy, limit = episode.policy, config.correction.max_episode_kl
        if limit is not None:
            drift = (episode.behaviour - policy.detach()).mean()
            self.sure(drift - limit)
            losses = torch.where((episode.advantages < 0) & (drift > limit), 0.0, losses)
        losses = episode.correction * losses
        if kl is not None and kl.place == "loss":
            penalty = _kl(policy, episode.reference, kl.estimator)
            if kl.estimator.startswith("abs"):
                self.sure(policy - episode.reference)
            if kl.unbiased:
                penalty = penalty * (policy - episode.behaviour).exp()
            losses = losses + kl.coef * penalty
        return losses - config.entropy_coef * episode.entropy


class AdamW:
    """Clip the gradients, then AdamW."""

    def __init__(self, config: Any, model: Model) -> None:
        self.config, self.model, self.steps = config, model, 0
        self.moments = {name: [torch.zeros_like(model.weights[name]) for _ in range(2)] for name in model.trained}

    def step(self, loss: Tensor) -> Weights:
        """Update the weights, and return the clipped gradients."""
        config, weights = self.config, self.model.weights
        leaves = [weights[name] for name in self.model.trained]
        given = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
        grads = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, given, strict=True)]
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        grads = [g * min(1.0, config.max_grad_norm / (norm + 1e-6)) for g in grads]
        self.steps += 1
        rate, (beta1, beta2) = config.learning_rate, config.adam_betas
        for name, grad in zip(self.model.trained, grads, strict=True):
            first, second = self.moments[name]
            first.mul_(beta1).add_((1 - beta1) * grad)
            second.mul_(beta2).add_((1 - beta2) * grad**2)
            decayed = weights[name].detach() * (1 - rate * (config.weight_decay if grad.ndim >= 2 else 0.0))
            spread = (second / (1 - beta2**self.steps)).sqrt() + config.adam_eps
            weights[name] = (decayed - rate * first / (1 - beta1**self.steps) / spread).requires_grad_()
        return dict(zip(self.model.trained, grads, strict=True))


def _spread(values: Tensor) -> tuple[float, float]:
    """Return mean, and deviation to divide by: 1 where all values are equal."""
    if not len(values):
        return 0.0, 1.0
    mean = values.mean().item()
    if values.max() - values.min() < 1e-12:
        return values[0].item(), 1.0
    return mean, math.sqrt(float((values - mean).square().sum()) / (len(values) - 1) + 1e-8)


def _kl(policy: Tensor, reference: Tensor, estimator: str) -> Tensor:
    difference = policy - reference
    k2 = difference**2 / 2
    match estimator.removesuffix("+"):
        case "k1":
            value = difference
        case "abs":
            value = difference.abs()
        case "k2":
            value = k2
        case _:
            value = ((-difference).exp() - 1 + difference).clamp(max=10)
    return value.detach() + k2 - k2.detach() if estimator.endswith("+") else value


# -- advantage estimators, by their names in a YAML --------------------------------------------------------


def _deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def _grpo(step: NaiveStep, divide_by_std: bool = True) -> None:
    for members in step.groups():
        totals = [episode.total for episode in members]
        mean, scale = sum(totals) / len(totals), _deviation(totals) + 1e-6 if divide_by_std else 1.0
        for episode in members:
            equal = len(set(totals)) == 1
            step.credit(episode, 0.0 if equal else (episode.total - mean) / scale)


def _dr_grpo(step: NaiveStep) -> None:
    _grpo(step, divide_by_std=False)


def _grpo_passk(step: NaiveStep, divide_by_std: bool = True) -> None:
    for members in step.groups():
        ranked = sorted(members, key=lambda episode: episode.total)
        scale = _deviation([episode.total for episode in members]) + 1e-6 if divide_by_std else 1.0
        for episode in members:
            step.credit(episode, 0.0)
        if len(ranked) > 1 and ranked[-1].total != ranked[-2].total:
            step.sure(torch.tensor(ranked[-1].total - ranked[-2].total))
            step.credit(ranked[-1], (ranked[-1].total - ranked[-2].total) / scale)


def _rloo(step: NaiveStep) -> None:
    for members in step.groups():
        for episode in members:
            others = [one.total for one in members if one is not episode]
            step.credit(episode, episode.total - sum(others) / len(others) if others else 0.0)


def _opo(step: NaiveStep) -> None:
    for members in step.groups():
        tokens = sum(episode.n for episode in members)
        mean = sum(episode.n * episode.total for episode in members) / max(tokens, 1)
        for episode in members:
            step.credit(episode, episode.total - mean)


def _gpg(step: NaiveStep, f_norm: float = 1.0) -> None:
    nonzero = sum(episode.total != 0 for episode in step.episodes)
    for members in step.groups():
        mean = sum(episode.total for episode in members) / len(members)
        for episode in members:
            step.credit(episode, (episode.total - mean) * len(step.episodes) / max(nonzero, 1) / f_norm)


def _reinforce_plus_plus_baseline(step: NaiveStep) -> None:
    _dr_grpo(step)
    step.whiten()
    for members in step.groups():
        if len({episode.total for episode in members}) == 1:
            for episode in members:
                step.credit(episode, 0.0)


def _discounted(values: Tensor, discount: float) -> Tensor:
    sums, later = torch.zeros_like(values), 0.0
    for place in reversed(range(len(values))):
        later = float(values[place]) + discount * later
        sums[place] = later
    return sums


def _reinforce(step: NaiveStep, gamma: float = 1.0) -> None:
    for episode in step.episodes:
        episode.advantages = _discounted(episode.rewards, gamma)


def _reinforce_plus_plus(step: NaiveStep, gamma: float = 1.0) -> None:
    _reinforce(step, gamma)
    step.whiten()


def _remax(step: NaiveStep) -> None:
    _reinforce(step)
    for episode in step.episodes:
        episode.advantages = episode.advantages - step.baselines[episode.group]


def _gae(step: NaiveStep, gamma: float = 1.0, lam: float = 1.0) -> None:
    for episode in step.episodes:
        following = torch.cat((episode.values[1:], torch.zeros(min(episode.n, 1), dtype=torch.float64)))
        errors = episode.rewards + gamma * following - episode.values
        episode.advantages = _discounted(errors, gamma * lam)
        episode.returns = episode.advantages + episode.values
    step.whiten()


def _optimal_token_baseline(step: NaiveStep, credit_lone_tail: bool = False) -> None:
    for episode in step.episodes:
        episode.advantages = torch.zeros(episode.n, dtype=torch.float64)
        episode.returns = _discounted(episode.rewards, 1.0)
        norms = 1 - 2 * episode.proximal.exp() + episode.squared
        episode.energy = (norms * episode.correction**2).cumsum(0)
    for members in step.groups():
        for place in range(max(episode.n for episode in members)):
            there = [episode for episode in members if episode.n > place]
            returns = [float(episode.returns[place]) for episode in there]
            energies = [float(episode.energy[place]) for episode in there]
            baseline = sum(r * e for r, e in zip(returns, energies, strict=True)) / (sum(energies) + 1e-8)
            for episode, value in zip(there, returns, strict=True):
                if len(set(returns)) > 1:
                    episode.advantages[place] = value - baseline
                elif credit_lone_tail and len(there) == 1 and len(members) > 1:
                    episode.advantages[place] = value


def _turn_grpo(step: NaiveStep, divide_by_std: bool = True) -> None:
    _turn_returns(step, gamma=0.0, divide_by_std=divide_by_std)


def _turn_returns(step: NaiveStep, gamma: float = 1.0, divide_by_std: bool = True) -> None:
    for episode in step.episodes:
        paths = {turn.path: turn for turn in episode.sequences}
        ends = torch.tensor([0, *episode.tokens_of]).cumsum(0).tolist()
        costs = [float(episode.penalties[a:b].sum()) for a, b in zip(ends, ends[1:], strict=False)]
        own = [float(turn.reward) - cost for turn, cost in zip(episode.sequences, costs, strict=True)]

        def parent(turn: Any, paths: dict[Any, Any] = paths) -> Any:
            above = [turn.path[:end] for end in range(len(turn.path) - 1, 0, -1)]
            return next((paths[path] for path in above if path in paths), None)

        def total(
            turn: Any, episode: Any = episode, own: list[float] = own, parent: Callable[..., Any] = parent
        ) -> Any:
            below = [total(one, episode, own, parent) for one in episode.sequences if parent(one) is turn]
            reward = own[episode.sequences.index(turn)]
            return reward + (gamma * sum(below) / len(below) if below else 0.0)

        episode.turns = [(turn.turn_idx, total(turn)) for turn in episode.sequences]
    for members in step.groups():
        compared: dict[int, tuple[float, float]] = {}
        for index in {index for episode in members for index, _ in episode.turns}:
            visits = [[value for at, value in episode.turns if at == index] for episode in members]
            visits = [values for values in visits if values]
            means = [sum(values) / len(values) for values in visits]
            if len(visits) < 2:
                continue
            mean = means[0] if len({value for values in visits for value in values}) == 1 else sum(means) / len(means)
            squares = sum(sum((value - mean) ** 2 for value in values) / len(values) for values in visits)
            compared[index] = mean, math.sqrt(squares / (len(visits) - 1)) + 1e-6 if divide_by_std else 1.0
        for episode in members:
            advantages = []
            for (index, value), count in zip(episode.turns, episode.tokens_of, strict=True):
                mean, scale = compared.get(index, (value, 1.0))
                advantages += [(value - mean) / scale] * count
            episode.advantages = torch.tensor(advantages, dtype=torch.float64)


# -- losses per token of an update's episodes, by their names in a YAML --------------------------------------


def _ratio(episode: Any) -> Tensor:
    return (episode.policy - episode.proximal).clamp(-20, 20).exp()


def _clipped(step: NaiveStep, ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return PPO's losses, and True where the clipped ratio decides, so that no gradient flows."""
    step.sure(ratio - low)
    step.sure(ratio - high)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return -advantages * torch.where(clipped, ratio.detach().clamp(low, high), ratio), clipped


def _loss_ppo(
    step: NaiveStep, members: Any, clip_eps: float = 0.2, clip_eps_high: float | None = None, dual_clip: float = 0.0
) -> list[Tensor]:
    losses = []
    for episode in members:
        ratio, high = _ratio(episode), clip_eps if clip_eps_high is None else clip_eps_high
        loss, _ = _clipped(step, ratio, episode.advantages, 1 - clip_eps, 1 + high)
        if dual_clip:
            step.sure(ratio - dual_clip)
            loss = torch.where((episode.advantages < 0) & (ratio > dual_clip), -episode.advantages * dual_clip, loss)
        losses.append(loss)
    return losses


def _loss_gspo(step: NaiveStep, members: Any, clip_eps: float = 3e-4, clip_eps_high: float = 4e-4) -> list[Tensor]:
    losses = []
    for episode in members:
        mean = (episode.policy - episode.proximal).mean().detach()
        ratio = (mean + episode.policy - episode.policy.detach()).exp()
        losses.append(_clipped(step, ratio, episode.advantages, 1 - clip_eps, 1 + clip_eps_high)[0])
    return losses


def _loss_gmpo(
    step: NaiveStep, members: Any, clip_eps: float = 0.4, clip_eps_high: float | None = None
) -> list[Tensor]:
    losses, high = [], clip_eps if clip_eps_high is None else clip_eps_high
    for episode in members:
        log_ratio, advantages = episode.policy - episode.proximal, episode.advantages
        step.sure(log_ratio + clip_eps)
        step.sure(log_ratio - high)
        bounded = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-clip_eps))
        bounded = torch.where(advantages == 0, 0.0, bounded)
        losses.append(-advantages.mean() * bounded.mean().exp().expand(episode.n))
    return losses


def _loss_cispo(step: NaiveStep, members: Any, clip_eps: float = 1.0, clip_eps_high: float = 0.28) -> list[Tensor]:
    return [
        -_ratio(one).detach().clamp(1 - clip_eps, 1 + clip_eps_high) * one.advantages * one.policy for one in members
    ]


def _loss_sapo(step: NaiveStep, members: Any, tau_positive: float = 1.0, tau_negative: float = 1.05) -> list[Tensor]:
    losses = []
    for episode in members:
        tau = torch.where(episode.advantages > 0, tau_positive, tau_negative).double()
        losses.append(-episode.advantages * 4 / tau * torch.sigmoid(tau * (_ratio(episode) - 1)))
    return losses


def _loss_reinforce(step: NaiveStep, members: Any) -> list[Tensor]:
    return [-episode.advantages * episode.policy for episode in members]


_loss_gpg = _loss_reinforce


def _covariances(members: Any) -> Tensor:
    advantages = torch.cat([episode.advantages for episode in members])
    policy = torch.cat([episode.policy for episode in members]).detach()
    return (advantages - advantages.mean()) * (policy - policy.mean())


def _loss_clip_cov(
    step: NaiveStep,
    members: Any,
    clip_eps: float = 0.2,
    token_share: float = 1.0,
    min_covariance: float = 1.0,
    max_covariance: float = 5.0,
) -> list[Tensor]:
    """With a share of 1: every token that qualifies is dropped, so no draw decides."""
    assert token_share == 1
    losses, covariances = [], _covariances(members)
    step.sure(covariances - min_covariance)
    step.sure(covariances - max_covariance)
    qualifies = (covariances > min_covariance) & (covariances < max_covariance)
    for episode, own in zip(members, qualifies.split([one.n for one in members]), strict=True):
        loss, clipped = _clipped(step, _ratio(episode), episode.advantages, 1 - clip_eps, 1 + clip_eps)
        losses.append(torch.where(own & ~clipped, 0.0, loss))
    return losses


def _loss_kl_cov(step: NaiveStep, members: Any, token_share: float = 2e-4, kl_coef: float = 1.0) -> list[Tensor]:
    covariances = _covariances(members)
    count = max(1, int(token_share * len(covariances)))
    ranked = covariances.sort(descending=True).values
    if count < len(ranked):
        step.sure(ranked[count - 1] - ranked[count])
    chosen = (covariances >= ranked[count - 1]).split([one.n for one in members])
    losses = []
    for episode, own in zip(members, chosen, strict=True):
        difference = episode.policy - episode.proximal
        if bool(difference.detach().any()):  # exactly 0 in the first update
            step.sure(difference)
        penalty = torch.where(own, kl_coef * difference.abs(), 0.0)
        losses.append(-episode.advantages * _ratio(episode) + penalty)
    return losses


def _loss_m2po(step: NaiveStep, members: Any, max_second_moment: float = 0.04) -> list[Tensor]:
    squares = torch.cat([(one.policy.detach() - one.behaviour) ** 2 for one in members])
    ranked = squares.sort().values
    means = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1)
    step.sure(means - max_second_moment)
    count = int((means <= max_second_moment).sum())
    largest = float(ranked[count - 1]) if count else -1.0
    return [
        torch.where((e.policy.detach() - e.behaviour) ** 2 <= largest, -e.advantages * _ratio(e), 0.0) for e in members
    ]
