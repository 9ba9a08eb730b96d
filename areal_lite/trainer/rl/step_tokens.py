"""One training step's trained tokens as flat tensors, and how the step is cut; no model, no optimizer.

``T`` is the number of trained tokens, in sequence order; the sequences of an episode are adjacent.
Advantages, losses and weights know episodes only, so it does not matter into how many sequences an episode
was cut. A micro-batch indexes into ``[T]``, so every cut reads and writes the same tensors.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from areal_lite.api.trajectory import TokenSequence
from areal_lite.data.batch.partition import get_seqlen_balanced_partitions
from areal_lite.errors import TrainingError
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.trainer.forward.microbatches import Block, num_inputs, plan_blocks, plan_microbatches, tree_length
from areal_lite.trainer.forward.packed_model import PackedModel, PackedSequences, pack


@dataclass(slots=True)
class StepTokens:
    """Per-token values of a step, ``[T]`` float32 unless noted; those that forward passes fill in start at 0."""

    sequences: Tensor  # ``[T]`` int64, the sequence of each token
    episodes: Tensor  # ``[T]`` int64, the episode of each token; non-decreasing
    ends: Tensor  # ``[T]`` bool, True at the last trained token of an episode
    versions: Tensor  # ``[T]`` int64, the policy version that sampled it, -1 where unknown
    behaviour: Tensor  # NaN where the engine's log-probs were not recorded
    proximal: Tensor
    policy: Tensor  # log-probs in the pass of the token's own update
    reference: Tensor
    sum_squared_probs: Tensor
    log_kept: Tensor  # log of the mass that truncation kept at the start of the step; 0 for renormalized log-probs
    values: Tensor
    correction: Tensor  # factor of the token's loss that corrects for off-policy sampling
    rewards: Tensor  # the token's own, or the episode's at its last trained token and 0 elsewhere; minus any KL penalty
    advantages: Tensor
    returns: Tensor
    known: Tensor  # ``[T]`` bool, True once the proximal log-prob is there
    computed: Tensor  # ``[T]`` bool, True once the policy's log-prob is there

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], episodes: Sequence[int], *, device: torch.device) -> "StepTokens":
        """Return the trained tokens of ``sequences``, which :func:`by_episode` has sorted and numbered."""
        counts = torch.tensor([sequence.num_trained_tokens for sequence in sequences])
        tokens = cls.zeros(
            torch.repeat_interleave(torch.tensor(episodes), counts).to(device),
            torch.repeat_interleave(torch.arange(len(sequences)), counts).to(device),
        )
        tokens.versions = _trained(sequences, "versions", -1, np.int64).to(device)
        tokens.behaviour = _trained(sequences, "logprobs", np.nan, np.float32).to(device)
        if any(sequence.reference_logprobs is not None for sequence in sequences):
            tokens.reference = _trained(sequences, "reference_logprobs", np.nan, np.float32).to(device)
        if any(sequence.token_rewards is not None for sequence in sequences):
            tokens.rewards = torch.from_numpy(np.concatenate([*map(_own_rewards, sequences)])).to(device)
        return tokens

    @classmethod
    def zeros(cls, episodes: Tensor, sequences: Tensor | None = None) -> "StepTokens":
        """Return tokens of ``episodes [T]`` with nothing filled in; ``sequences`` None: one per episode."""
        ends = torch.ones_like(episodes, dtype=torch.bool)
        ends[:-1] = episodes[1:] != episodes[:-1]
        given = {
            "episodes": episodes,
            "sequences": episodes if sequences is None else sequences,
            "ends": ends,
            "versions": torch.full_like(episodes, -1),
        }
        flags = {name: torch.zeros_like(ends) for name in ("known", "computed")}
        names = [field.name for field in fields(cls) if field.name not in {*given, *flags}]
        zeros = {name: torch.zeros(len(episodes), device=episodes.device) for name in names}
        return cls(**given, **flags, **zeros)

    def behaviour_or_proximal(self) -> Tensor:
        """Return renormalized behaviour log-probs, the proximal ones where none were recorded (ratio 1)."""
        return torch.where(self.behaviour.isnan(), self.proximal, self.behaviour - self.log_kept)

    def chosen(self, sequences: Sequence[int]) -> Tensor:
        """Return ``[T]`` bool, True at the tokens of the sequences."""
        wanted = torch.zeros(int(self.sequences.max()) + 1, dtype=torch.bool, device=self.sequences.device)
        wanted[torch.tensor([s for s in sequences if s < len(wanted)], dtype=torch.int64)] = True
        return wanted[self.sequences]


def by_episode(sequences: Sequence[TokenSequence]) -> tuple[list[TokenSequence], list[int]]:
    """Return the sequences by episode, and the number of each one's; one without a member index is its own episode."""
    episodes: dict[Hashable, list[TokenSequence]] = {}
    for index, sequence in enumerate(sequences):
        key = index if sequence.member_idx is None else (sequence.group_id, sequence.member_idx)
        episodes.setdefault(key, []).append(sequence)
    numbered = [(number, sequence) for number, own in enumerate(episodes.values()) for sequence in own]
    return [sequence for _, sequence in numbered], [number for number, _ in numbered]


def _trained(sequences: Sequence[TokenSequence], name: str, missing: float, dtype: type) -> Tensor:
    columns = [
        np.full(sequence.num_trained_tokens, missing, dtype)
        if (values := getattr(sequence, name)) is None
        else values[sequence.loss_mask].astype(dtype)
        for sequence in sequences
    ]
    return torch.from_numpy(np.concatenate(columns))


def _own_rewards(sequence: TokenSequence) -> NDArray[np.float32]:
    """Return the rewards of a sequence's trained tokens; 0 if it is rewarded as a whole. A reward at a token that does
    not train goes to the next one that does, or to the last."""
    trained = np.flatnonzero(sequence.loss_mask)
    if sequence.token_rewards is None or not len(trained):
        return np.zeros(len(trained), np.float32)
    receiver = np.searchsorted(trained, np.arange(len(sequence))).clip(max=len(trained) - 1)
    return np.bincount(receiver, sequence.token_rewards).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Microbatch:
    packed: PackedSequences
    tokens: Tensor  # ``[N]`` index into ``[T]`` of each token that ``packed`` predicts
    counts: bool = True  # False for a dummy that keeps this rank in step with the others; its loss is 0


def split_groups(sequences: Sequence[TokenSequence], count: int, *, rng: np.random.Generator) -> list[list[int]]:
    """Return ``count`` shares of whole groups in random order; shares without a trained token are dropped. Which groups
    share an update depends on their numbers, the order in which they were drawn, so a resumed run shares alike."""
    groups: dict[str, list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(sequence.group_id, []).append(index)
    members = [groups[name] for name in sorted(groups, key=lambda name: (len(name) if name.isdecimal() else 0, name))]
    shares = (
        [index for group in sorted(share) for index in members[group]]
        for share in np.array_split(rng.permutation(len(members)), count)
    )
    return [share for share in shares if any(sequences[index].num_trained_tokens for index in share)]


@dataclass(eq=False)
class StepCut:
    """Cuts sequences of one step into this rank's micro-batches for one model. Units are divided among the ranks, with
    nearly equal numbers of tokens: whole episodes share prefixes. ``units`` has the unit of each sequence; None: each
    is one. ``whole`` also keeps a unit in one micro-batch, which losses over pairs or whole episodes need."""

    sequences: Sequence[TokenSequence]
    model: PackedModel
    _: KW_ONLY
    ranks: Ranks
    device: torch.device
    units: Sequence[Hashable] | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        _check_ids(self.sequences, self.model)
        self._units: Sequence[Hashable] = range(len(self.sequences)) if self.units is None else self.units
        self._offsets = np.cumsum([0, *(sequence.num_trained_tokens for sequence in self.sequences)])

    def __call__(self, chosen: Sequence[int], max_tokens: int) -> Iterator[Microbatch]:
        """Yield micro-batches of this rank's share of ``chosen``, as many as on any; ``max_tokens`` is one rank's."""
        chosen = [index for index in chosen if self.sequences[index].num_trained_tokens]
        max_tokens *= self.model.parts
        bundles = plan_blocks(
            self.sequences,
            self._share(chosen),
            max_tokens=max_tokens,
            balance_length=self.model.balance_length,
            share=self.model.shares_prefixes,
            units=self._units if self.whole else None,
        )
        ragged = self.model.ragged  # side by side, a bundle is as wide as its tokens and needs no padding
        sums, widths = ([f(block.length for block in bundle) for bundle in bundles] for f in (sum, max))
        plan = plan_microbatches(
            [1] * len(bundles) if ragged else widths,
            max_tokens=max_tokens,
            num_blocks=sums if ragged else [len(bundle) for bundle in bundles],
        )
        num_fillers = self.ranks.most(len(plan), self.device) - len(plan)
        for numbers in plan:
            batch = [block for number in numbers for block in bundles[number]]
            positions = [np.arange(*self._offsets[[i, i + 1]]) for block in batch for i in block.sequences]
            yield Microbatch(self._pack(batch), torch.from_numpy(np.concatenate(positions)).to(self.device))
        for _ in range(num_fillers):
            yield self._filler(chosen)

    def _share(self, chosen: list[int]) -> list[int]:
        if self.ranks.dp == 1:
            return chosen
        units: dict[Hashable, list[int]] = {}
        for index in chosen:
            units.setdefault(self._units[index], []).append(index)
        members = list(units.values())
        lengths = [tree_length(self.sequences, unit) for unit in members]
        lengths += [0] * (self.ranks.dp - len(members))  # some ranks have nothing
        parts = get_seqlen_balanced_partitions(lengths, self.ranks.dp)
        return [i for index in parts[self.ranks.dp_rank] if index < len(members) for i in members[index]]

    def _filler(self, chosen: Sequence[int]) -> Microbatch:
        shortest = min(chosen, key=lambda index: num_inputs(self.sequences[index]))
        block = Block((shortest,), (0,), num_inputs(self.sequences[shortest]))
        index = torch.arange(*self._offsets[[shortest, shortest + 1]].tolist(), device=self.device)
        return Microbatch(self._pack([block]), index, counts=False)

    def _pack(self, blocks: Sequence[Block]) -> PackedSequences:
        return pack(self.sequences, blocks, device=self.device, model=self.model, multiple=self.model.parts)


def _check_ids(sequences: Sequence[TokenSequence], model: PackedModel) -> None:
    """Check that every token is in the vocabulary; on a GPU another id would end the process."""
    for index, sequence in enumerate(sequences):
        if not len(sequence):
            continue
        low, high = int(sequence.input_ids.min()), int(sequence.input_ids.max())
        if low < 0 or high >= model.vocab_size:
            raise TrainingError(
                f"task {sequence.task_id or index}: token id {low if low < 0 else high} is not in the vocabulary "
                f"[0, {model.vocab_size}) of the {type(model.model).__name__}: use the tokenizer of this model"
            )
