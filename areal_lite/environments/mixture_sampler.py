"""The order of a mixture's training rows: exact quotas, an epoch of its own for each part, parts that end.

A part's share is its weight divided by the weights of all parts that have not ended. Guarantees that after any number
of draws since the shares last changed, each part has had its share of them to within 1. A row of a part is available
once the part's share exceeds its rows so far, and due when the share includes that row; of the available rows, the one
that is due first comes next. This is earliest deadline first on one processor, which meets every deadline while the
shares sum to 1. Fractions keep it exact. Choosing the part that is owed most instead would break the bound: with many
small parts, a large one falls behind by more than 1.

Source: proportionate progress (Baruah et al. 1996); the quota method of apportionment (Balinski and Young 1975).
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import fmean
from typing import Any
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.rows.loader import EpochSampler
from areal_lite.data.rows.samplers import AbstractSampler
from areal_lite.errors import ConfigError

WINDOW = 32
"""Latest trained groups of a part whose mean reward ``until`` is compared with."""


@dataclass
class _Part:
    rows: list[int]
    weight: Fraction
    until: float | None
    order: EpochSampler
    drawn: int = 0
    counted: int = 0
    """Rows drawn since the shares last changed."""
    ended: bool = False
    rewards: list[float] = field(default_factory=list)
    epoch: tuple[int, list[int]] = (-1, [])

    def next_row(self) -> int:
        number, place = divmod(self.drawn, len(self.rows))
        if self.epoch[0] != number:
            self.order.set_epoch(number)
            self.epoch = number, list(self.order)
        self.drawn, self.counted = self.drawn + 1, self.counted + 1
        return self.rows[self.epoch[1][place]]

    @property
    def reached(self) -> bool:
        return self.until is not None and len(self.rewards) == WINDOW and fmean(self.rewards) >= self.until


_STATE = ("drawn", "counted", "ended", "rewards")


class MixtureSampler(AbstractSampler):
    """Chooses rows by the parts of ``config.kwargs``; raises ConfigError if a part has none."""

    def __init__(self, data_source: Sequence[Mapping[str, Any]], config: DatasetConfig) -> None:
        self._size = self._left = len(data_source)  # rows left in this epoch
        places = defaultdict(list)
        for place, row in enumerate(data_source):
            places[row["data_source"]].append(place)
        self._parts: dict[str, _Part] = {}
        for part in config.kwargs["parts"]:
            own, name = places[part["name"]], part["name"]
            if not own:
                raise ConfigError(f"train_dataset: no row of {name} is left: raise max_samples, or remove the part")
            digest = hashlib.sha256(f"{config.kwargs['seed']}-{name}".encode()).digest()
            order = EpochSampler(own, shuffle=config.shuffle, seed=int.from_bytes(digest[:8]))
            self._parts[name] = _Part(own, Fraction(str(part["weight"])), part["until"], order)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        while self._left:
            self._left -= 1
            yield self._next_part().next_row()
        self._left = self._size

    def _open(self) -> list[_Part]:
        return [part for part in self._parts.values() if not part.ended]

    def _next_part(self) -> _Part:
        parts = self._open()
        total, draw = sum(part.weight for part in parts), 1 + sum(part.counted for part in parts)
        available = (part for part in parts if part.counted * total < draw * part.weight)
        return min(available, key=lambda part: (part.counted + 1) / part.weight)

    def update(self, batch: Any) -> None:
        """Note the mean reward of each trained group, and end the parts that have reached ``until``, unless that would
        be all. A cached batch has no rows, and is ignored."""
        columns = batch.non_tensor_batch
        scores = batch.batch["episode_rewards" if "episode_rewards" in batch.batch else "rewards"].tolist()
        members = columns.get("member_idx", range(len(scores)))
        groups: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        for number, row in enumerate(columns.get("rows", ())):
            groups[row["data_source"], columns["group_ids"][number]][members[number]] = scores[number]
        for (name, _), episodes in groups.items():
            rewards = self._parts[name].rewards
            rewards.append(fmean(episodes.values()))
            del rewards[:-WINDOW]
        parts = self._open()
        if any(part.reached for part in parts) and not all(part.reached for part in parts):
            for part in parts:
                part.ended, part.counted = part.reached, 0

    def state_dict(self) -> dict[str, Any]:
        parts = {name: {key: getattr(part, key) for key in _STATE} for name, part in self._parts.items()}
        return {"left": self._left, "parts": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._left = state["left"]
        for name, values in state["parts"].items():
            for key in _STATE:
                setattr(self._parts[name], key, values[key])
