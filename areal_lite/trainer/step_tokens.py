"""One training step's trained tokens as flat tensors, and how the step is cut; no model, no optimizer.

``[T]`` counts the trained tokens of all samples, sample by sample. A micro-batch names its tokens by
their place in it, so every cut reads and writes the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from areal_lite.data.batch.partition import get_seqlen_balanced_partitions
from areal_lite.data.batch.training_sample import TrainingSample
from areal_lite.trainer.microbatches import num_inputs, plan_microbatches, plan_rows
from areal_lite.trainer.packed_model import PackedModel, PackedRows, pack
from areal_lite.trainer.ranks import Ranks

T = TypeVar("T")


@dataclass(slots=True)
class StepTokens:
    """Per-token values of a step, ``[T]`` float32 unless said; what forward passes fill in starts at 0."""

    episodes: Tensor
    """``[T]`` int64, the sample each token is of."""
    ends: Tensor
    """``[T]`` bool, True at the last trained token of a sample."""
    versions: Tensor
    """``[T]`` int64, the policy version that sampled it, -1 where unknown."""
    behaviour: Tensor
    """NaN where the engine's log-probs were not recorded."""
    proximal: Tensor
    reference: Tensor
    sum_squared_probs: Tensor
    values: Tensor
    correction: Tensor
    """What its loss is multiplied by for not being sampled from the proximal policy."""
    rewards: Tensor
    """What each token earned: its sample's reward at the last trained one, less a KL penalty."""
    advantages: Tensor
    returns: Tensor
    known: Tensor
    """``[T]`` bool, True once the proximal log-prob is there."""
    computed: Tensor
    """``[T]`` bool, True once the policy's log-prob is there."""

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], *, device: torch.device) -> StepTokens:
        counts = torch.tensor([sample.num_trained_tokens for sample in samples])
        tokens = cls.zeros(torch.repeat_interleave(torch.arange(len(samples)), counts).to(device))
        tokens.versions = _trained(samples, "versions", -1, np.int64).to(device)
        tokens.behaviour = _trained(samples, "behaviour_logprobs", np.nan, np.float32).to(device)
        return tokens

    @classmethod
    def zeros(cls, episodes: Tensor) -> StepTokens:
        """Return tokens of the given ``episodes [T]`` of which nothing is known."""
        ends = torch.ones_like(episodes, dtype=torch.bool)
        ends[:-1] = episodes[1:] != episodes[:-1]
        given = {"episodes": episodes, "ends": ends, "versions": torch.full_like(episodes, -1)}
        flags = {name: torch.zeros_like(ends) for name in ("known", "computed")}
        names = [field.name for field in fields(cls) if field.name not in {*given, *flags}]
        return cls(
            **given, **flags, **{name: torch.zeros(len(episodes), device=episodes.device) for name in names}
        )

    def behaviour_or_proximal(self) -> Tensor:
        """Return behaviour log-probs, the proximal ones where none were recorded (ratio 1)."""
        return torch.where(self.behaviour.isnan(), self.proximal, self.behaviour)

    def fill(self, samples: Sequence[int], found: Mapping[str, Tensor]) -> None:
        """Take over values ``[T]`` by name at the tokens of the samples."""
        here = self.chosen(samples)
        for name, values in found.items():
            getattr(self, name)[here] = values[here]

    def chosen(self, samples: Sequence[int]) -> Tensor:
        """Return ``[T]`` bool, True at the tokens of the samples."""
        wanted = torch.zeros(int(self.episodes.max()) + 1, dtype=torch.bool, device=self.episodes.device)
        wanted[torch.tensor([s for s in samples if s < len(wanted)], dtype=torch.int64)] = True
        return wanted[self.episodes]


def _trained(samples: Sequence[TrainingSample], name: str, missing: float, dtype: type) -> Tensor:
    columns = [
        np.full(sample.num_trained_tokens, missing, dtype)
        if (values := getattr(sample, name)) is None
        else values[sample.loss_mask].astype(dtype)
        for sample in samples
    ]
    return torch.from_numpy(np.concatenate(columns))


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward pass."""

    packed: PackedRows
    tokens: Tensor
    """``[N]`` places in the step of what ``packed`` predicts."""
    counts: bool = True
    """False for one that only keeps this rank in step with the others."""


def split_groups(
    samples: Sequence[TrainingSample], count: int, *, rng: np.random.Generator
) -> list[list[int]]:
    """Return ``count`` shares of whole groups in random order, fewer where some have no trained token.

    Which groups share an update depends on their ids, and not on the order of the batch.
    """
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    members = [groups[name] for name in sorted(groups)]
    shares = (
        [index for group in sorted(share) for index in members[group]]
        for share in np.array_split(rng.permutation(len(members)), count)
    )
    return [share for share in shares if any(samples[index].num_trained_tokens for index in share)]


class StepCut:
    """Cuts samples of one step into this rank's micro-batches for one model.

    Args:
        samples: All of the step, on every rank.
        model: Says which rows it can read.
        ranks: The samples are divided among them, with nearly equally many tokens for each.
        device: Where the micro-batches go.
        together: Keep the samples of a group on one rank and in one micro-batch, as a loss over pairs needs.
    """

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        model: PackedModel,
        *,
        ranks: Ranks,
        device: torch.device,
        together: bool = False,
    ) -> None:
        self._samples = samples
        self._model = model
        self._ranks = ranks
        self._device = device
        self._together = together
        self._offsets = np.cumsum([0, *(sample.num_trained_tokens for sample in samples)])

    def __call__(self, chosen: Sequence[int], max_tokens: int) -> Iterator[Microbatch]:
        """Yield micro-batches of this rank's share of the ``chosen`` samples, as many as on every other rank."""
        chosen = [index for index in chosen if self._samples[index].num_trained_tokens]
        own = self._share(chosen)
        rows = plan_rows(
            self._samples,
            own,
            max_tokens=max_tokens,
            balance_length=self._model.balance_length,
            share=self._model.shares_prefixes,
        )
        blocks = self._by_group(rows, lambda row: row.samples[0])
        ragged = self._model.ragged  # side by side, a block is as wide as its tokens and needs no padding
        sums, widths = ([f(row.length for row in block) for block in blocks] for f in (sum, max))
        plan = plan_microbatches(
            [1] * len(blocks) if ragged else widths,
            max_tokens=max_tokens,
            num_rows=sums if ragged else [len(block) for block in blocks],
        )
        num_idle = self._ranks.most(len(plan), self._device) - len(plan)
        for numbers in plan:
            batch = [row for number in numbers for row in blocks[number]]
            places = [np.arange(*self._offsets[[i, i + 1]]) for row in batch for i in row.samples]
            yield Microbatch(
                packed=pack(self._samples, batch, device=self._device, ragged=ragged),
                tokens=torch.from_numpy(np.concatenate(places)).to(self._device),
            )
        for _ in range(num_idle):
            yield self._idle(chosen)

    def _share(self, chosen: list[int]) -> list[int]:
        if self._ranks.size == 1:
            return chosen
        units = self._by_group(chosen, lambda index: index)
        lengths = [sum(num_inputs(self._samples[index]) for index in unit) for unit in units]
        lengths += [0] * (self._ranks.size - len(units))  # some ranks have nothing
        parts = get_seqlen_balanced_partitions(lengths, self._ranks.size)
        return [index for place in parts[self._ranks.rank] if place < len(units) for index in units[place]]

    def _by_group(self, items: Sequence[T], sample_of: Callable[[T], int]) -> list[list[T]]:
        """Return the items of each group where groups stay together, else each alone."""
        if not self._together:
            return [[item] for item in items]
        groups: dict[str, list[T]] = {}
        for item in items:
            groups.setdefault(self._samples[sample_of(item)].group_id, []).append(item)
        return list(groups.values())

    def _idle(self, chosen: Sequence[int]) -> Microbatch:
        shortest = min(chosen, key=lambda index: num_inputs(self._samples[index]))
        (row,) = plan_rows(self._samples, [shortest], max_tokens=1, balance_length=1, share=False)
        place = torch.arange(*self._offsets[[shortest, shortest + 1]].tolist(), device=self._device)
        packed = pack(self._samples, [row], device=self._device, ragged=self._model.ragged)
        return Microbatch(packed, place, counts=False)
