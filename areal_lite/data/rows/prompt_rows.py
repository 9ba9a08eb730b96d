"""The dataset that a config names: its rows, without those whose prompts are too long; rows that grow; a user's class.

A user's generator adds rows at the start and after each step. Guarantees that dropped rows are counted by reason, and
that a resumed run has the rows it had generated. ``load_rows`` reads the rows; ``prompt_encoder`` measures a prompt.
"""

import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
import orjson
from torch.utils.data import Dataset
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.dotted_path import load_class
from areal_lite.data.chat.chat_template import TemplateError
from areal_lite.data.chat.prompt_encoder import PromptEncoder
from areal_lite.data.rows.load_rows import load_rows, select_rows
from areal_lite.data.rows.text_rows import Row, checked_row, different_columns
from areal_lite.errors import ConfigError, did_you_mean

_log = logging.getLogger(__name__)
TOO_LONG = "too long"
TEMPLATE_FAILED = "template failed"


class PromptRows(Dataset[Any]):
    """The rows of a dataset section as they were read, without the dropped ones.

    ``dropped`` counts those by reason, :data:`TOO_LONG` or :data:`TEMPLATE_FAILED`; ``first_failure`` is the first
    message of the chat template. A run adds ``raw_prompt_ids`` and the like to a row when its group starts. ConfigError
    if the rows cannot be loaded, all are dropped, or a column is missing; ValueError for another ``max_samples``.

    Args:
        data_files: Paths, as :func:`areal_lite.data.rows.load_rows.load_rows` takes them.
        tokenizer: Hugging Face tokenizer with a chat template; None if only ``rows`` are needed.
        config: Column names and settings; ``data_files`` replaces its path.
        processor: Hugging Face processor of a model that reads images or videos, for :class:`RLHFDataset`.
        max_samples: Rows before filtering, at least 1; -1 uses ``config.max_samples``.
        system_prompt: System message before a prompt that is text.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: DatasetConfig,
        processor: Any = None,
        max_samples: int = -1,
        seed: int = 1,
        system_prompt: str | None = None,
    ) -> None:
        if max_samples != -1 and max_samples < 1:
            raise ValueError(f"max_samples is {max_samples}: it must be 1 or more, or -1 for all")
        path = data_files if isinstance(data_files, str) else list(data_files)
        self.config = replace(config, path=path, max_samples=config.max_samples if max_samples == -1 else max_samples)
        self.processor = processor
        self.tokenizer = tokenizer
        self.encoder = None if tokenizer is None else self._encoder_with(system_prompt)
        self.dropped: Counter[str] = Counter()
        self.first_failure: str | None = None
        self.rows: Sequence[Row] = load_rows(self.config, seed=seed)
        # Rows need no prompt, unless they are tokenized or the config names the column; a generator may not tokenize.
        reads = tokenizer is not None and (config.datagen is None or config.filter_overlong_prompts)
        if reads or config.prompt_key != DatasetConfig.prompt_key:
            self._check_column(self.rows[0], "prompt_key")
        for name in ("label_key", "metadata_key"):
            if getattr(config, name) is not None:
                self._check_column(self.rows[0], name)
        num_rows = len(self.rows)
        self.rows = self.without_overlong(self.rows)
        if not self.rows:
            raise ConfigError(
                f"dataset {self.config.path}: none of {num_rows} rows is left; {self._drop_summary()}: raise "
                "max_prompt_length, or fix the rows or the template"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def without_overlong(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows that pass the config's filter; the others are counted in ``dropped``."""
        if not self.config.filter_overlong_prompts:
            return rows
        if (limit := self.config.max_prompt_length) is None:
            raise ConfigError("filter_overlong_prompts is set, but max_prompt_length is not: set it as well")
        encoder, where = self._encoder("filter_overlong_prompts"), f"dataset {self.config.path}"
        measure = functools.partial(_reason_to_drop, encoder, limit, where)
        if isinstance(rows, list):
            reasons = [measure(row, index)["reason"] for index, row in enumerate(rows)]
        else:
            workers = min(self.config.filter_overlong_prompts_workers, len(rows))
            reasons = rows.map(  # type: ignore[attr-defined]
                measure,
                with_indices=True,
                num_proc=workers if workers > 1 else None,
                remove_columns=rows.column_names,  # type: ignore[attr-defined]
                keep_in_memory=True,
                load_from_cache_file=False,
                desc=f"Filtering prompts longer than {limit} tokens",
            )["reason"][:]
        kept = [index for index, reason in enumerate(reasons) if not reason]
        if len(kept) == len(rows):
            return rows
        self.dropped.update(reason.partition(":")[0] for reason in reasons if reason)
        self.first_failure = self.first_failure or next((r for r in reasons if r.startswith(TEMPLATE_FAILED)), None)
        _log.warning("dataset %s: %s", self.config.path, self._drop_summary())
        return select_rows(rows, kept)

    def _drop_summary(self) -> str:
        failures = self.dropped[TEMPLATE_FAILED]
        return (
            f"dropped {self.dropped[TOO_LONG]} rows with prompts longer than {self.config.max_prompt_length} tokens"
            + (f", and {failures} rows that failed; first: {self.first_failure}" if failures else "")
        )

    def _encoder(self, purpose: str) -> PromptEncoder:
        if self.encoder is None:
            raise ConfigError(f"dataset {self.config.path}: {purpose} needs a tokenizer: pass one")
        return self.encoder

    def _check_column(self, row: Row, setting: str) -> None:
        key = getattr(self.config, setting)
        if isinstance(row, str | list) or key in row:  # a prompt has no columns
            return
        columns = f"the columns are {sorted(row)}{did_you_mean(key, row)}"
        raise ConfigError(f"dataset {self.config.path}: no column {key!r} ({setting}); {columns}")

    def _encoder_with(self, system_prompt: str | None) -> PromptEncoder:
        return PromptEncoder(self.config, self.tokenizer, system_prompt)


def _reason_to_drop(
    encoder: PromptEncoder, limit: int, where: str, row: Mapping[str, Any], index: int
) -> dict[str, str]:
    try:
        length = len(encoder.encode(row).input_ids)
    except TemplateError as error:  # counted and logged; fatal only if every row fails
        return {"reason": f"{TEMPLATE_FAILED}: {error}"}
    except ConfigError as error:
        raise ConfigError(f"{where}, row {index}: {error}") from error
    return {"reason": TOO_LONG if length > limit else ""}


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
        if not isinstance(self.rows[0], Mapping):
            raise ConfigError(f"datagen adds rows with columns, and those of {config.path} are texts: remove datagen")
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
    """Return a dataset of the user's class ``config.custom_cls``, else of ``default``, with the arguments ``given``:
    data_files, tokenizer, processor; max_samples, seed and system_prompt, unless the user's class does not accept them.
    ConfigError if the class cannot be loaded, is not a torch dataset, or does not accept a given max_samples."""
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
