"""Training rows that grow: a generator of the user's adds some at the start and after each step.

Guarantees that a resumed run sees the rows it had made. Knows nothing of how rows are drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from areal_lite.api.config import DatasetConfig
from areal_lite.data.rows.load_rows import Row
from areal_lite.data.rows.rl_dataset import RLHFDataset
from areal_lite.data.rows.text_rows import checked_row, different_columns
from areal_lite.data.rows.user_class import load_class
from areal_lite.errors import ConfigError


class AbstractDataGenerator(ABC):
    """What a user writes to make training rows.

    Args:
        config: The training data's section of the config.
    """

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: RLHFDataset) -> Sequence[Row]:
        """Return new rows: dicts of JSON values with the columns of ``dataset.rows``; none is fine."""


class DynamicGenDataset(RLHFDataset):
    """A data set to which the generator of ``config.datagen`` adds rows, once when it is made and after each step.

    ``rows`` stays one object that grows at its end. New rows go through the filter of the others.

    Args: those of :class:`RLHFDataset`.

    Raises:
        ConfigError: Also if the generator cannot be had.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: DatasetConfig,
        processor: Any = None,
        max_samples: int = -1,
        seed: int = 1,
    ) -> None:
        if config.datagen is None:
            raise ConfigError("datagen is null: name the file or module and the class of a data generator")
        super().__init__(data_files, tokenizer, config, processor, max_samples, seed)
        cls = load_class(config.datagen, AbstractDataGenerator, where="datagen")
        self.data_generator: AbstractDataGenerator = cls(self.config)
        self.rows: _GrowingRows = _GrowingRows(self.rows)
        self._generate()

    def on_batch_end(self, batch: Any) -> None:
        """Add the rows the generator makes after the training step of ``batch``.

        Raises:
            ConfigError: If it returns what are no rows.
        """
        self._generate()

    def state_dict(self) -> dict[str, Any]:
        """Return the rows made so far, JSON values."""
        return {"generated": orjson.loads(orjson.dumps(self.rows.generated))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the rows of ``state`` in the place of those made so far."""
        self.rows.generated[:] = orjson.loads(orjson.dumps(state["generated"]))

    def _generate(self) -> None:
        where = f"datagen {type(self.data_generator).__name__}"
        rows = [
            checked_row(row, f"{where}, row {number}")
            for number, row in enumerate(self.data_generator.generate(self), 1)
        ]
        try:
            rows = orjson.loads(orjson.dumps(rows))
        except TypeError as error:
            raise ConfigError(
                f"{where}: its rows cannot be saved ({error}): make them of JSON values, with text as keys"
            ) from error
        columns = self.rows[0].keys()
        for number, row in enumerate(rows, 1):
            if row.keys() != columns:
                raise different_columns(str(self.config.path), columns, f"{where}, row {number}", row)
        if rows:
            self.rows.generated.extend(self.without_overlong(rows))


class _GrowingRows(Sequence[Row]):
    """Rows that stay on disk, and those made since."""

    def __init__(self, given: Sequence[Row]) -> None:
        self.given = given
        self.generated: list[Row] = []

    def __len__(self) -> int:
        return len(self.given) + len(self.generated)

    def __getitem__(self, place: Any) -> Any:
        place = range(len(self))[place]
        if isinstance(place, range):
            return [self[single] for single in place]
        behind = place - len(self.given)
        return self.given[place] if behind < 0 else self.generated[behind]

    def __getitems__(self, places: Sequence[int]) -> list[Row]:
        return [self[place] for place in places]
