"""The dataset that a config names: fixed rows, growing rows, or the user's own class.

A user's generator adds rows at the start and after each step. Guarantees that a resumed run has the rows it had
generated. Knows nothing about the order of rows.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from torch.utils.data import Dataset

from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.dotted_path import load_class
from areal_lite.data.rows.load_rows import Row
from areal_lite.data.rows.prompt_rows import PromptRows
from areal_lite.data.rows.text_rows import checked_row, different_columns
from areal_lite.errors import ConfigError


class AbstractDataGenerator(ABC):
    """Base class of a user's generator of training rows."""

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: PromptRows) -> Sequence[Row]:
        """Return new rows: dicts of JSON values with the columns of ``dataset.rows``. May be empty."""


class DynamicGenRows(PromptRows):
    """Rows to which the generator ``config.datagen`` adds rows, at construction and after each step."""

    def __init__(
        self, data_files: str | Sequence[str], tokenizer: Any, config: DatasetConfig, *args: Any, **kwargs: Any
    ) -> None:
        if config.datagen is None:
            raise ConfigError("datagen is null: set the path and name of a data generator class")
        super().__init__(data_files, tokenizer, config, *args, **kwargs)
        cls = load_class(config.datagen, AbstractDataGenerator, where="datagen")
        self.data_generator: AbstractDataGenerator = cls(self.config)
        self.rows: _GrowingRows = _GrowingRows(self.rows)
        self._generate()

    def on_batch_end(self, batch: Any) -> None:
        """Add the generator's rows after the training step on ``batch``."""
        self._generate()

    def state_dict(self) -> dict[str, Any]:
        """Return the generated rows as JSON values."""
        return {"generated": orjson.loads(orjson.dumps(self.rows.generated))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the generated rows with those of ``state``."""
        self.rows.generated[:] = orjson.loads(orjson.dumps(state["generated"]))

    def _generate(self) -> None:
        where = f"datagen {type(self.data_generator).__name__}"
        columns = self.rows[0].keys()
        made = self.data_generator.generate(self)
        try:
            rows = orjson.loads(orjson.dumps([checked_row(row, f"{where}, row {i}") for i, row in enumerate(made, 1)]))
        except TypeError as error:
            raise ConfigError(f"{where}: cannot save its rows ({error}): use JSON values, text keys") from error
        for number, row in enumerate(rows, 1):
            if row.keys() != columns:
                raise different_columns(str(self.config.path), columns, f"{where}, row {number}", row)
        if rows:
            self.rows.generated.extend(self.without_overlong(rows))


class _GrowingRows(Sequence[Row]):
    def __init__(self, on_disk: Sequence[Row]) -> None:
        self.on_disk = on_disk
        self.generated: list[Row] = []

    def __len__(self) -> int:
        return len(self.on_disk) + len(self.generated)

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        if isinstance(index, range):
            return [self[single] for single in index]
        generated = index - len(self.on_disk)
        return self.on_disk[index] if generated < 0 else self.generated[generated]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        return [self[index] for index in indices]


def make_dataset(config: DatasetConfig, default: type[PromptRows], **given: Any) -> Dataset[Any]:
    """Return a dataset of the user's class ``config.custom_cls``, else of ``default``.

    Args:
        given: Arguments of the class: data_files, tokenizer, processor; max_samples, seed and system_prompt are left
            out if the user's class does not accept them.

    Raises:
        ConfigError: If the class cannot be loaded, is not a torch dataset, or does not accept a max_samples that
            was given.
    """
    if config.custom_cls is None:
        return default(config=config, **given)
    cls: Any = load_class(config.custom_cls, Dataset, where="custom_cls")
    parameters = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        optional = {"max_samples", "seed", "system_prompt"} - parameters.keys()
        if (most := given.get("max_samples", -1)) != -1 and "max_samples" in optional:
            raise ConfigError(
                f"max_samples is {most}, but {cls.__name__} takes no max_samples: add the argument or leave it unset"
            )
        given = {name: value for name, value in given.items() if name not in optional}
    return cls(config=config, **given)  # type: ignore[no-any-return]
