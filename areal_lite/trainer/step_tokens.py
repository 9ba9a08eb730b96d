"""One training step's trained tokens as flat tensors, and how the step is cut; no model, no optimizer.

``[T]`` counts the trained tokens of all samples, sample by sample. A micro-batch names its tokens by
their place in it, so every cut reads and writes the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_lite.data.training_sample import TrainingSample
from areal_lite.trainer.logprobs import PackedRows, pack
from areal_lite.trainer.microbatches import plan_microbatches, plan_rows


@dataclass(slots=True)
class StepTokens:
    """Per-token values of a step, each ``[T]`` float32; log-probs start at 0 and are filled by the forward passes."""

    advantages: Tensor
    behaviour: Tensor
    """NaN where the engine's log-probs were not recorded."""
    proximal: Tensor
    policy: Tensor
    reference: Tensor
    entropy: Tensor
    computed: Tensor
    """Bool, True once the policy's log-prob is there."""

    @classmethod
    def of(
        cls, samples: Sequence[TrainingSample], advantages: NDArray[np.float64], *, device: torch.device
    ) -> StepTokens:
        counts = [sample.num_trained_tokens for sample in samples]
        behaviour = [
            np.full(count, np.nan, np.float32)
            if sample.behaviour_logprobs is None
            else sample.behaviour_logprobs[sample.loss_mask].astype(np.float32)
            for sample, count in zip(samples, counts, strict=True)
        ]
        zeros = torch.zeros(sum(counts), device=device)
        return cls(
            advantages=torch.from_numpy(np.repeat(advantages, counts).astype(np.float32)).to(device),
            behaviour=torch.from_numpy(np.concatenate(behaviour)).to(device),
            proximal=zeros,
            policy=zeros.clone(),
            reference=zeros.clone(),
            entropy=zeros.clone(),
            computed=zeros.bool(),
        )

    def behaviour_or_proximal(self) -> Tensor:
        """Return behaviour log-probs, the proximal ones where none were recorded (weight 1)."""
        return torch.where(self.behaviour.isnan(), self.proximal, self.behaviour)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward pass."""

    packed: PackedRows
    tokens: Tensor
    """``[N]`` where its trained tokens stand in :class:`StepTokens`."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """One optimizer update."""

    microbatches: tuple[Microbatch, ...]
    num_loss_tokens: int
    """Trained tokens of its groups, those left out of the forward pass included."""


def cut_step(
    samples: Sequence[TrainingSample],
    has_gradient: Sequence[bool],
    *,
    num_minibatches: int,
    max_tokens: int,
    balance_length: int,
    share_prefixes: bool,
    rng: np.random.Generator,
    device: torch.device,
) -> list[Minibatch]:
    """Return the step's minibatches: whole groups in random order, an equal share each, none without tokens."""
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    members = list(groups.values())
    offsets = np.cumsum([0, *(sample.num_trained_tokens for sample in samples)])
    minibatches: list[Minibatch] = []
    for share in np.array_split(rng.permutation(len(members)), num_minibatches):
        indices = [index for group in sorted(share) for index in members[group]]
        num_loss_tokens = int(sum(samples[index].num_trained_tokens for index in indices))
        if not num_loss_tokens:
            continue
        rows = plan_rows(
            samples,
            [index for index in indices if has_gradient[index]],
            max_tokens=max_tokens,
            balance_length=balance_length,
            share=share_prefixes,
        )
        plan = plan_microbatches([row.length for row in rows], max_tokens=max_tokens)
        microbatches = []
        for chosen in plan:
            batch = [rows[number] for number in chosen]
            places = [np.arange(offsets[i], offsets[i + 1]) for row in batch for i in row.samples]
            microbatches.append(
                Microbatch(
                    packed=pack(samples, batch, device=device),
                    tokens=torch.from_numpy(np.concatenate(places)).to(device),
                )
            )
        minibatches.append(Minibatch(tuple(microbatches), num_loss_tokens))
    return minibatches
