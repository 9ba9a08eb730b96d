"""One training step written out: transformers, autograd, and loops over episodes, one sequence at a time.

Imports nothing of areal_lite: from rewards and recorded tokens to gradients and new weights, in float64. Configs and
sequences are read by their public attributes. A step also reports how near its numbers came to a threshold (a clip
bound, a rejection bound, a sort), because float32 may fall on the other side there.
"""

from __future__ import annotations
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
import torch
from torch import Tensor, nn
from torch.func import functional_call
from tests.trainer.naive_estimators import ESTIMATORS
from tests.trainer.naive_losses import LOSSES

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
        ESTIMATORS[self.config.advantage](self, **self.config.advantage_kwargs)
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
        values = [torch.zeros(0, dtype=torch.float64)]
        for sequence in episode.sequences:
            before = sequence.loss_mask.nonzero()[0] - 1
            if len(before):
                values.append(self.critic(sequence.input_ids.tolist())[before, 0])
        return torch.cat(values)

    # -- rewards and corrections ----------------------------------------------------------------------

    def reward(self) -> float:
        """Reward the tokens, subtract penalties, and return the next step's KL coefficient."""
        config, kl = self.config, self.config.kl
        means = []
        for episode in self.episodes:
            rewards = [float(one.reward) for one in episode.sequences]
            episode.score = rewards[0] if len(set(rewards)) == 1 else sum(rewards) / len(rewards)
            episode.rewards = torch.zeros(episode.n, dtype=torch.float64)
            episode.penalties = torch.zeros_like(episode.rewards)
            if episode.n:
                episode.rewards += self.token_rewards(episode)
            if config.overlong_buffer:
                start = self.sampling.max_new_tokens - config.overlong_buffer
                penalty = min(max((episode.n - start) / config.overlong_buffer, 0.0), 1.0)
                episode.score -= penalty
                episode.rewards[-1:] -= penalty
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

    def token_rewards(self, episode: Any) -> Tensor:
        """Return the rewards of tokens, each at the next trained one or the last; else the episode's at the last."""
        rewards = torch.zeros(episode.n, dtype=torch.float64)
        (first, *_) = episode.sequences
        if first.token_rewards is None:
            rewards[-1] = episode.score
            return rewards
        trained = [place for place, trains in enumerate(first.loss_mask) if trains]
        for place, reward in enumerate(first.token_rewards.tolist()):
            before = sum(other < place for other in trained)
            rewards[min(before, episode.n - 1)] += reward
        return rewards

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
            used = [episode for episode in self.episodes if episode.n]
            shares = [1 / episode.n if config.level == "sequence" else 1.0 for episode in used]
            total = sum(share * e.n for share, e in zip(shares, used, strict=True))
            weighed = sum(share * e.correction.sum().item() for share, e in zip(shares, used, strict=True))
            for episode in used:
                episode.correction = episode.correction * total / weighed
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

    def spread(self, episodes: Sequence[Any]) -> tuple[float, float]:
        """Return mean, and deviation to divide by, of the tokens' advantages: 1 where all are equal."""
        values = torch.cat([episode.advantages for episode in episodes])
        if not len(values) or values.max() - values.min() < 1e-12:
            return float(values[0]) if len(values) else 0.0, 1.0
        mean = values.mean().item()
        return mean, math.sqrt(float((values - mean).square().sum()) / (len(values) - 1) + 1e-8)

    def whiten(self) -> None:
        """Scale all advantages to mean 0 and deviation 1."""
        mean, scale = self.spread(self.episodes)
        for episode in self.episodes:
            episode.advantages = (episode.advantages - mean) / scale

    def normalize_advantages(self) -> None:
        """Subtract means and divide by deviations over the tokens of a group or of the batch."""
        config = self.config
        for members in self.groups():
            scales = {"none": (0.0, 1.0), "group": self.spread(members), "batch": self.spread(self.episodes)}
            for episode in members:
                shift, scale = scales[config.advantage_mean][0], scales[config.advantage_std][1]
                episode.normalized = (episode.advantages - shift) / scale
        for episode in self.episodes:
            episode.advantages = episode.normalized

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
            losses = LOSSES[self.config.loss](self, members, **self.config.loss_kwargs)
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
