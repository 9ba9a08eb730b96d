"""An endless stream of rows whose place can be saved and found again.

Guarantees that every epoch gives each row once, in an order that depends on (seed, epoch) alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_lite.errors import ConfigError


class RolloutDataSource(Iterator[dict[str, Any]]):
    """``next(source)`` is a copy of the next row; any thread may ask.

    Args:
        rows: At least one row.
        seed: Makes the order of the epochs.
        shuffle: False keeps the order of ``rows`` in every epoch.

    Raises:
        ConfigError: If there are no rows.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, seed: int, shuffle: bool) -> None:
        if not rows:
            raise ConfigError("the data source has no rows: give at least one")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._lock = threading.Lock()
        self._epoch = 0
        self._offset = 0
        self._order = self._epoch_order()

    def __next__(self) -> dict[str, Any]:
        """Return the next row; a new epoch follows the last row of the one before."""
        with self._lock:
            if self._offset == len(self._rows):
                self._epoch += 1
                self._offset = 0
                self._order = self._epoch_order()
            row = self._rows[self._order[self._offset]]
            self._offset += 1
        return dict(row)

    def state_dict(self) -> dict[str, Any]:
        """Return the place as JSON values: epoch, offset (rows given in it), fingerprint of the data."""
        with self._lock:
            return {"epoch": self._epoch, "offset": self._offset, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            ConfigError: If rows, seed or shuffle are not what they were then.
        """
        with self._lock:
            if state["fingerprint"] != self._fingerprint:
                raise ConfigError(
                    f"the checkpoint was made with other data: its fingerprint is {state['fingerprint']}, this is "
                    f"{self._fingerprint}. Use the same rows, seed and shuffle, or start another trial"
                )
            self._epoch, self._offset = int(state["epoch"]), int(state["offset"])
            self._order = self._epoch_order()

    def _epoch_order(self) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._rows))
        order = list(range(len(self._rows)))
        random.Random(f"{self._seed}-{self._epoch}").shuffle(order)
        return order

    @functools.cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self._seed}-{self._shuffle}".encode())
        for row in self._rows:
            # What JSON cannot hold, an image say, counts by its type alone.
            digest.update(
                json.dumps(dict(row), default=lambda value: str(type(value)), skipkeys=True).encode()
            )
        return f"{len(self._rows)}:{digest.hexdigest()[:16]}"
