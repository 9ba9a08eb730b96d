"""The sections of dataset rows: ``train_dataset:`` and ``eval_dataset:``."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal
from pydantic.dataclasses import dataclass
from areal_lite.config.schema import STRICT, Above0, Positive, refuse


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClassConfig:
    """A user-defined class."""

    path: str
    """A Python file, or the dotted path of a module."""
    name: str
    """Name of the class in it."""


MIXTURE = "areal_lite.environments.mixture.rows"
"""Path of the rows that a list of environments becomes."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MixturePart:
    """An environment in a list that train_dataset and eval_dataset may be."""

    env: str
    """PREFIX:NAME of an environment with rows, or the dotted path of a class."""
    name: str | None = None
    """Its data_source in rows and metrics. Null is env."""
    weight: Above0 = 1.0
    """Share of the training rows, relative to the other parts."""
    until: float | None = None
    """Once its last 32 trained groups reach this mean reward, the others share its quota. The last parts continue."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of its rows (size, seed, ...)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RowsConfig:
    """Source and order of the dataset rows, and where their prompts are."""

    path: str | list[str]
    """Files (parquet, json, jsonl, csv, arrow; compressed, globs, SPLIT@PATH, or a list of them), a hub dataset,
    an environment (reasoning-gym:TASK, as in env), or the dotted path of a function that returns rows."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's rows or the function (size, seed, ...)."""
    max_samples: Positive | None = None
    """Limit on the number of rows: the first ones or, with shuffle, a random subset drawn with the run's seed."""
    shuffle: bool = True
    """Shuffle each epoch, seeded by (seed, epoch); false keeps the order of the rows."""
    cache_dir: str | None = None
    """Cache folder for remote files. Null is ~/.cache/areal_lite."""
    collate_fn: str | None = None
    """Dotted path of a function that makes a batch of a list of rows: the consumer_batch_size rows that become workflow
    input together, as columns (verl's) or a list; or the items of a supervised update, as a list."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of messages."""
    tools_key: str = "tools"
    """Column of tool schemas for the chat template; may be missing."""
    tools_in_system_prompt: bool = False
    """Write tools into the system prompt, and calls and results as text (Hermes form), for templates without tools."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra chat template variables, or chat_template to replace the template."""
    image_urls: bool = False
    """Fetch images that rows name by an http(s) URL; false refuses them. Files are read from the data's folder only."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DatasetConfig(RowsConfig):
    """Dataset rows, and how their prompts are tokenized for a workflow that takes them, and for their length."""

    label_key: str | None = None
    """Column of the label."""
    metadata_key: str | None = None
    """Column of a dict that becomes Sample.metadata for buffer_filter, and metadata in the row of the workflow."""
    need_tools_kwargs: bool = False
    """Give every row index, tools_kwargs and interaction_kwargs of its extra_info, and warn if tools_kwargs is empty;
    false gives them to the rows that have any."""
    image_key: str = "images"
    """Column of the images that replace <image> in a message, for own training loops: in a run agents send images."""
    video_key: str = "videos"
    """Column of the videos that replace <video> in a message, for training loops of your own."""
    tool_key: str | None = None
    """Another name of tools_key: set one of the two."""
    max_prompt_length: Positive | None = None
    """Maximum tokens of a prompt. Null: no limit."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """For prompts above max_prompt_length: raise an error, or the part to cut."""
    filter_overlong_prompts: bool = False
    """Drop rows with prompts above max_prompt_length at the start."""
    filter_overlong_prompts_workers: Positive = 1
    """Processes that measure prompts."""
    apply_chat_template: bool = True
    """Write prompts with the chat template. false: a prompt is text, and used as it is."""
    return_raw_chat: bool = False
    """Add raw_prompt, the messages, to each row."""
    return_full_prompt: bool = False
    """Add full_prompts, the rendered text, to each row."""
    custom_cls: ClassConfig | None = None
    """Custom torch Dataset class, constructed with data_files, tokenizer, processor and config."""
    sampler: ClassConfig | None = None
    """Custom curriculum that orders the rows: a subclass of areal_lite.data.rows.samplers.AbstractSampler."""
    datagen: ClassConfig | None = None
    """Custom data generator that adds training rows after each step."""

    def __post_init__(self) -> None:
        if self.tool_key is not None:
            if self.tools_key not in ("tools", self.tool_key):
                raise ValueError(
                    f"tools_key is {self.tools_key!r} and tool_key {self.tool_key!r}, two names of one key: remove one"
                )
            object.__setattr__(self, "tools_key", self.tool_key)
        refuse_template_options(self, "return_raw_chat")


def refuse_template_options(rows: Any, *others: str) -> None:
    """Raise ValueError if ``rows`` are not written with the chat template, and an option of it is set."""
    for name in ("apply_chat_template_kwargs", "tools_in_system_prompt", *others):
        if not rows.apply_chat_template and (value := getattr(rows, name)):
            raise ValueError(
                f"apply_chat_template is false, and {name} is {value!r}, which needs the template: remove it, "
                "or set apply_chat_template: true"
            )


_DEFAULTS = DatasetConfig(path="")


def refuse_idle(section: str, rows: DatasetConfig, faults: Mapping[str, str]) -> None:
    """Refuse the keys of a dataset section that are set and would do nothing, for the reasons ``faults``."""
    given = {name: getattr(rows, name) for name in faults}
    refuse(
        {
            f"{section}.{name} is {value!r}, but would do nothing: {faults[name]}": value != getattr(_DEFAULTS, name)
            for name, value in given.items()
        }
    )
