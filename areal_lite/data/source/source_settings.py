"""Settings of a data source, and what they make of a dataset row: a sample's fields, a workflow's input."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.packer.data_packer import DataPacker, rollout_inputs
from areal_lite.data.rows.added_columns import metadata_of
from areal_lite.data.source.sample import Prompt, Sample, deep_copy, with_own_containers
from areal_lite.errors import ConfigError

SampleGroup = list[Sample]
"""The samples of one dataset row: slime's view of a :class:`~areal_lite.api.trajectory.Group`."""
BufferFilter = Callable[[Any, int | None, list[SampleGroup], int], list[SampleGroup]]
"""``filter(source, rollout_id, buffer, num_samples)`` returns at most ``num_samples`` groups of ``buffer``.

``source`` is the data source, whose ``update_metadata`` keeps what a filter must remember, also over a restart; one
made from slime's ``args`` passes them instead. ``rollout_id`` is None. It may leave the buffer alone or delete from it:
what it returns is handed out and leaves the buffer; what it deletes and does not return is dropped.
"""


class DrawnRow(NamedTuple):
    """A dataset row on its way into a group."""

    position: int | None
    row: Any
    mini_batch: tuple[Callable[[], list[dict[str, Any]]], int] | None = None
    """Makes the input of the rows that it becomes input with, once; and its index there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSettings:
    """How rows are drawn and what becomes of one."""

    n_samples_per_prompt: int = 1
    seed: int = 1
    """Determines the order of the epochs."""
    shuffle: bool = False
    """False keeps the order of the rows in every epoch."""
    prompt_key: str = "prompt"
    """Column that becomes ``Sample.prompt``; a row without it has an empty prompt."""
    label_key: str | None = None
    metadata_key: str | None = None
    """Column, a dict, that becomes ``Sample.metadata``."""
    reward_key: str | None = None
    """Entry of a reward that is a dict, for filters that compare rewards."""
    render: Callable[[Any], Prompt] | None = None
    """Makes ``Sample.prompt`` of a row; None takes the column as it is."""
    packer: DataPacker | None = None
    """Turns a row into workflow input; None passes the row."""
    mini_batch_size: int = 1
    """Rows that a packer with its own ``rollout_collate_fn`` gets at once."""
    buffer_filter: BufferFilter | str | None = None
    """Chooses from the buffer: a function or its dotted path; None takes the groups that were added first."""
    name: str = ""
    """Name of the dataset, for its fingerprint."""
    slime_args: Any = None
    """slime's ``args``, if the source was made from them."""

    def __post_init__(self) -> None:
        if self.n_samples_per_prompt < 1:
            raise ConfigError(f"n_samples_per_prompt is {self.n_samples_per_prompt}: it must be 1 or more")

    @property
    def rows_at_once(self) -> int:
        """Rows that become workflow input together."""
        return self.mini_batch_size if self.packer is not None and self.packer.collates else 1

    def columns_of(self, row: Any) -> dict[str, Any]:
        """Return a row as a dict; text and messages alone are the column ``prompt_key``."""
        return row if isinstance(row, Mapping) else {self.prompt_key: row}  # type: ignore[return-value]

    def sample_fields(self, row: Any) -> dict[str, Any]:
        """Return the sample's fields that come from its row, except the metadata."""
        columns = self.columns_of(row)
        prompt = self.render(row) if self.render is not None else deep_copy(columns.get(self.prompt_key, ""))
        label = columns.get(self.label_key) if self.label_key else None
        return {"row": row, "prompt": prompt, "label": deep_copy(label)}

    def in_mini_batches(self, positions: Sequence[int | None], rows: Sequence[Any]) -> list[DrawnRow]:
        """Return the rows, those that become workflow input together with their mini-batch."""
        size = self.rows_at_once
        if size == 1:
            return list(map(DrawnRow, positions, rows))
        assert self.packer is not None
        drawn: list[DrawnRow] = []
        for start in range(0, len(rows), size):
            own = [with_own_containers(row) for row in rows[start : start + size]]
            mini_batch = cache(partial(rollout_inputs, self.packer, own, prompt_key=self.prompt_key))
            drawn += [DrawnRow(positions[start + i], rows[start + i], (mini_batch, i)) for i in range(len(own))]
        return drawn

    def new_group(self, drawn: DrawnRow, number: int, first_index: int) -> SampleGroup:
        """Return the samples of a row, whose indices count from ``first_index``; they share no container with it.
        Raises ConfigError if the row is neither a dict nor text nor a list."""
        row = deep_copy(checked_row(drawn.row))
        fields, metadata = self.sample_fields(row), metadata_of(row, self.metadata_key)
        first = Sample(first_index, group_index=number, position=drawn.position, metadata=metadata, **fields)
        first.mini_batch = drawn.mini_batch
        return [first, *(first.sibling(first_index + i) for i in range(1, self.n_samples_per_prompt))]


def checked_row(row: Any) -> Any:
    if not isinstance(row, Mapping | str | list):
        raise ConfigError(
            f"a row of the dataset is {row!r:.100}: each row must be a dict of columns, text, or a list of messages"
        )
    return row


def dataset_of(args: Any) -> tuple[Any, SourceSettings]:
    """Return the dataset of slime's ``args``, None without ``rollout_global_dataset``; settings with its defaults."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    settings = SourceSettings(
        n_samples_per_prompt=args.n_samples_per_prompt,
        seed=given.get("rollout_seed", 42),
        shuffle=given.get("rollout_shuffle", False),
        prompt_key=given.get("input_key", "input"),
        label_key=given.get("label_key"),
        metadata_key=given.get("metadata_key"),
        reward_key=given.get("reward_key"),
        buffer_filter=given.get("buffer_filter_path"),
        name=str(given.get("prompt_data", "")),
        slime_args=args,
    )
    if not args.rollout_global_dataset:
        return None, settings
    if missing := [name for name in ("prompt_data", "hf_checkpoint") if name not in given]:
        raise ConfigError(f"rollout_global_dataset is true, and args has no {missing[0]}: set it")
    from areal_lite.data.chat.tokenizer import load_tokenizer
    from areal_lite.data.rows.prompt_rows import PromptRows

    longest = given.get("rollout_max_prompt_len")
    config = DatasetConfig(
        path=args.prompt_data,
        prompt_key=settings.prompt_key,
        label_key=settings.label_key,
        tool_key=given.get("tool_key"),
        apply_chat_template=given.get("apply_chat_template", False),
        max_prompt_length=longest,
        filter_overlong_prompts=longest is not None,
    )
    dataset = PromptRows(args.prompt_data, load_tokenizer(args.hf_checkpoint), config)
    if (encoder := dataset.encoder) is not None and config.apply_chat_template:
        settings = replace(settings, render=lambda row: encoder.encode(row).text)
    return dataset, settings
