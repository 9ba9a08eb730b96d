"""The adapter between dataset rows, engine and trainer: one object per kind of model.

On the CPU, it makes a workflow's input and a training sequence of each answer, and collates the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from areal_lite.api.engine_api import Row
from areal_lite.api.trajectory import Group, TokenSequence
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.dotted_path import load_object
from areal_lite.data.rows.added_columns import rows_of_batch, with_added
from areal_lite.data.source.sample import Sample
from areal_lite.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from areal_lite.data.batch.data_proto import DataProto

RolloutOutput = str | list[int] | TokenSequence | Sample
"""An answer's text, its ids, or what was recorded: prompt, answers and the text between. A run gives sequences."""


class DataPacker(ABC):
    """Five hooks; :meth:`setup` runs before any of them."""

    tokenizer: Any = None
    processor: Any = None
    config: DatasetConfig = DatasetConfig(path="")
    """The dataset section of the config; its defaults if rows come from no file."""
    prepare_prompt: Callable[[Row], Row] | None = None
    """Returns the forms of a row's prompt that the run adds to the workflow's input; None adds nothing."""
    collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None
    """The ``collate_fn`` of the dataset section, which makes a batch of a mini-batch of rows."""

    def setup(self, *, tokenizer: Any, processor: Any = None, config: DatasetConfig | None = None) -> None:
        """Take what the run has loaded: the model's tokenizer and processor (Hugging Face), the dataset section."""
        self.tokenizer, self.processor = tokenizer, processor
        if config is not None:
            self.config = config

    @abstractmethod
    def get_rollout_input(self, item: Any) -> Any:
        """Return what a workflow gets for one dataset row."""
        raise NotImplementedError("implement get_rollout_input in the subclass")

    def rollout_collate_fn(self, items: list[Any]) -> list[Any]:
        """Return one mini-batch of inputs, one for each of ``items`` in order; the list itself by default. A run
        collates ``rollout.consumer_batch_size`` rows at once, in the order in which it draws them."""
        return items

    @property
    def collates(self) -> bool:
        """True if rows become input together: there is a collate_fn, or the class has its own rollout_collate_fn."""
        return self.collate_fn is not None or type(self).rollout_collate_fn is not DataPacker.rollout_collate_fn

    @abstractmethod
    def get_policy_input(self, sample: Any, rollout_output: RolloutOutput) -> Any:
        """Return the training sequence for one dataset row and one of its answers."""
        raise NotImplementedError("implement get_policy_input in the subclass")

    @abstractmethod
    def policy_compute_max_len(self, processed_samples: Sequence[Any]) -> int:
        """Return the length, in tokens, of the longest sequence of a mini-batch; callers may round it up."""
        raise NotImplementedError("implement policy_compute_max_len in the subclass")

    @abstractmethod
    def policy_collate_fn(self, processed_samples: Sequence[Any], computed_max_len: int) -> dict[str, Any]:
        """Return the mini-batch padded to ``computed_max_len``, with the keys of a training batch."""
        raise NotImplementedError("implement policy_collate_fn in the subclass")


_DECODER_ONLY = "areal_lite.data.packer.decoder_only_llm_packer.DecoderOnlyLLMDataPacker"
# A dotted path is imported on first use.
_packers: dict[str, str | type[DataPacker]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"), _DECODER_ONLY),
    "qwen2_5_vl": "areal_lite.data.vision.qwen2_5_vlm_packer.Qwen2_5_VLM_DataPacker",
}
PackerClass = TypeVar("PackerClass", bound=type[DataPacker])


def register_data_packer(*model_types: str) -> Callable[[PackerClass], PackerClass]:
    """Return a class decorator that registers a packer for these ``model_type``s; ConfigError if one has another."""

    def register(packer: PackerClass) -> PackerClass:
        for model_type in model_types:
            if (other := _packers.get(model_type, packer)) is not packer:
                name = other if isinstance(other, str) else other.__name__
                raise ConfigError(
                    f"model type {model_type!r} has the packer {name} already: name yours in the YAML, "
                    "data_packer: package.module.Class"
                )
        _packers.update(dict.fromkeys(model_types, packer))
        return packer

    return register


def make_data_packer(model_type: str, path: str | None = None) -> DataPacker:
    """Return a new packer: the class at the dotted ``path``, else the one registered for ``model_type``."""
    packer = path if path is not None else _packers.get(model_type, _DECODER_ONLY)
    if isinstance(packer, str):
        packer = load_object(packer, where="data_packer")
    if not (isinstance(packer, type) and issubclass(packer, DataPacker)):
        raise ConfigError(
            f"data_packer is {path!r}: it must be a subclass of areal_lite.data.packer.data_packer.DataPacker"
        )
    return packer()


class UnpreparedRow(dict[str, Any]):
    """A row on its way to a workflow, whose input is made from it when its group starts."""

    def __init__(self, columns: Row, prepare: Callable[[], dict[str, Any]]) -> None:
        super().__init__(columns)
        self._prepare = prepare

    def prepared(self) -> dict[str, Any]:
        """Return the workflow's input; what a packer or the prompt's preparation raises comes out."""
        made = self._prepare()
        return made.prepared() if isinstance(made, UnpreparedRow) else made


def rollout_inputs(packer: DataPacker, rows: Sequence[Any], *, prompt_key: str = "prompt") -> list[dict[str, Any]]:
    """Return what workflows get for ``rows``, one dict each, in order; with ``prepare_prompt`` :class:`UnpreparedRow`.
    If the packer turns a row into text or messages, they become the dict's ``prompt_key``."""
    inputs = packer.rollout_collate_fn([packer.get_rollout_input(row) for row in rows])
    if len(inputs) != len(rows):
        raise ConfigError(
            f"{type(packer).__name__}.rollout_collate_fn made {len(inputs)} inputs of {len(rows)}: return one for each"
        )
    made = []
    for row, item in zip(rows, inputs, strict=True):
        others = row if isinstance(row, Mapping) and not isinstance(item, Mapping) else {}
        columns = {**others, **(item if isinstance(item, Mapping) else {prompt_key: item})}
        made.append(with_added(columns, row, packer.config))
    if packer.collate_fn is not None:
        made = rows_of_batch(packer.collate_fn(made), len(rows))
    if (prepare := packer.prepare_prompt) is None:
        return made

    def unprepared(row: Any, item: Any, columns: dict[str, Any]) -> UnpreparedRow:
        # A packer's text of a conversation is rendered already, and a row that is text is used as it is.
        source: Any = row if isinstance(row, list | str) and isinstance(item, str) else columns
        return UnpreparedRow(columns, lambda: {**prepare(source), **columns})

    return list(map(unprepared, rows, inputs, made))


def training_batch(packer: DataPacker, groups: Sequence[Group]) -> "DataProto":
    """Return the accepted groups as a ``DataProto``, one item per sequence, each through the packer; with baselines. It
    is for packers that change what is trained. ConfigError without a reward, TrainingError without accepted groups."""
    from areal_lite.data.batch.data_proto import DataProto
    from areal_lite.data.batch.training_batch import training_sequences, with_baselines

    processed = [
        packer.get_policy_input(row_of(group), sequence) for group in groups for sequence in training_sequences([group])
    ]
    if not processed:
        raise TrainingError("there is no accepted episode to train on: look at the dump for the reasons")
    length = packer.policy_compute_max_len(processed)
    return with_baselines(DataProto.from_single_dict(packer.policy_collate_fn(processed, length)), groups)


def row_of(group: Group) -> Any:
    """Return the dataset row of a group, or the workflow's input if it came from no data source."""
    return group.samples[0].row if group.samples else dict(group.data)
