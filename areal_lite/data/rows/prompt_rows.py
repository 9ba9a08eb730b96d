"""The rows of a run, without those whose prompts are too long.

Guarantees that dropped rows are counted by reason. ``load_rows`` reads the rows; ``prompt_encoder`` measures a prompt.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset

from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.chat.prompt_encoder import PromptEncoder, TemplateError
from areal_lite.data.rows.load_rows import Row, load_rows, select_rows
from areal_lite.errors import ConfigError

_log = logging.getLogger(__name__)

TOO_LONG = "too long"
TEMPLATE_FAILED = "template failed"
_BAD_ROW = "bad row: "


class PromptRows(Dataset[Any]):
    """The rows of a dataset section as they were read, without the dropped ones.

    ``dropped`` counts those by reason, :data:`TOO_LONG` or :data:`TEMPLATE_FAILED`; ``first_failure`` is the first
    message of the chat template. A run adds ``raw_prompt_ids`` and the like to a row when its group starts.

    Args:
        data_files: Paths, as :func:`areal_lite.data.rows.load_rows.load_rows` takes them.
        tokenizer: Hugging Face tokenizer with a chat template; None if only ``rows`` are needed.
        config: Column names and settings; ``data_files`` replaces its path.
        processor: Hugging Face processor of a model that reads images or videos, for :class:`RLHFDataset`.
        max_samples: Rows before filtering; -1 uses ``config.max_samples``.
        system_prompt: System message before a prompt that is text.

    Raises:
        ConfigError: If the rows cannot be loaded, all are dropped, or, with a tokenizer, the prompt column is missing.
        ValueError: If ``max_samples`` is neither -1 nor positive.
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
        most = config.max_samples if max_samples == -1 else max_samples
        self.config = replace(config, path=path, max_samples=most)
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
        limit = self.config.max_prompt_length
        if limit is None:
            raise ConfigError("filter_overlong_prompts is set, but max_prompt_length is not: set it as well")
        measure = functools.partial(_reason_to_drop, self._encoder("filter_overlong_prompts"), limit)
        if isinstance(rows, list):
            reasons = [measure(row)["reason"] for row in rows]
        else:
            workers = min(self.config.filter_overlong_prompts_workers, len(rows))
            reasons = rows.map(  # type: ignore[attr-defined]
                measure,
                num_proc=workers if workers > 1 else None,
                remove_columns=rows.column_names,  # type: ignore[attr-defined]
                keep_in_memory=True,
                load_from_cache_file=False,
                desc=f"Filtering prompts longer than {limit} tokens",
            )["reason"][:]
        for index, reason in enumerate(reasons):
            if reason.startswith(_BAD_ROW):
                raise ConfigError(f"dataset {self.config.path}, row {index}: {reason.removeprefix(_BAD_ROW)}")
        kept = [index for index, reason in enumerate(reasons) if not reason]
        if len(kept) == len(rows):
            return rows
        self.dropped.update(reason.partition(":")[0] for reason in reasons if reason)
        failures = (reason for reason in reasons if reason.startswith(TEMPLATE_FAILED))
        self.first_failure = self.first_failure or next(failures, None)
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
        if isinstance(row, str | list):  # a prompt without columns
            return
        if key not in row:
            close = difflib.get_close_matches(key, row)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"dataset {self.config.path}: no column {key!r} ({setting}); the columns are {sorted(row)}{hint}"
            )

    def _encoder_with(self, system_prompt: str | None) -> PromptEncoder:
        return PromptEncoder(self.config, self.tokenizer, system_prompt)


def _reason_to_drop(encoder: PromptEncoder, limit: int, row: Mapping[str, Any]) -> dict[str, str]:
    try:
        length = len(encoder.encode(row).input_ids)
    except TemplateError as error:  # counted and logged; fatal only if every row fails
        return {"reason": f"{TEMPLATE_FAILED}: {error}"}
    except ConfigError as error:
        return {"reason": f"{_BAD_ROW}{error}"}
    return {"reason": TOO_LONG if length > limit else ""}
