"""Every section of a run's YAML, one record each; docstrings are what ``--help`` shows."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from areal_lite.api.generation import GenerationHyperparameters
from areal_lite.api.schema import STRICT
from areal_lite.api.trainer_config import TrainerConfig as TrainerConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _path_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} becomes a folder: use letters, digits, '.', '_' and '-', at most 100")
    return value


PathName = Annotated[str, AfterValidator(_path_name)]


def _one_answer(gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
    if gconfig.n_samples != 1:
        raise ValueError(
            f"n_samples is {gconfig.n_samples}: a request gives one answer. Remove it; rollout.group_size, or "
            "evaluation.group_size, says how many episodes a row has"
        )
    return gconfig


Sampling = Annotated[GenerationHyperparameters, AfterValidator(_one_answer)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class InferenceEngineConfig:
    """How episodes are scheduled, against which servers, and how old their data may grow."""

    backend: Literal["sglang", "vllm", "embedded"] = "embedded"
    """Wire dialect of the servers; embedded speaks SGLang's and is started for you where addresses is empty."""

    addresses: list[str] = field(default_factory=list)
    """host:port of each running server."""

    experiment_name: PathName = "experiment"
    """Folder below fileroot; a run's YAML sets it at the top."""

    trial_name: PathName = "trial"
    """Folder below experiment_name; a run's YAML sets it at the top."""

    fileroot: str = "runs"
    """Folder that holds everything a run writes."""

    seed: int | None = None
    """Makes what the embedded server draws a function of weights, row and place in the run. How it rounds depends on
    what else is in its batch, which can change a token, unless trainer.deterministic is set; a run's YAML sets it at
    the top. Null: the server draws."""

    tokenizer_path: str | None = None
    """Folder of the tokenizer; agents need it, dumps use it to show text. Null: the run's model."""

    dump_to_file: bool = False
    """Write every episode to fileroot/experiment/trial/[rollout|eval-rollout]/version/task_id.jsonl."""

    group_size: Positive = 1
    """Episodes per dataset row; their rewards are each other's baseline."""

    on_error: Literal["drop_sample", "drop_group", "raise"] = "drop_sample"
    """When an episode of a group fails: train the others, drop the group, or stop the run."""

    consumer_batch_size: Positive = 1
    """Groups in one training batch."""

    max_concurrent_rollouts: Positive | None = None
    """Most groups running at once; null: as many as the staleness bound lets start."""

    max_head_offpolicyness: Annotated[int, Field(ge=0)] = 0
    """Staleness bound: policy versions between a trajectory's oldest trained token and the version that
    trains on it. 0 is fully on-policy: generation waits for every weight update."""

    over_sampling_groups: Annotated[int, Field(ge=0)] = 0
    """Groups started beyond those a batch needs; the first to finish are trained. On-policy the others are stopped
    when the batch is cut and drawn first for the next one, with mask_offpolicy_in_partial_rollout from the tokens
    they have, else anew."""

    mask_offpolicy_in_partial_rollout: bool = False
    """Train a group of which some tokens grew too old on its other tokens, instead of drawing its row again."""

    stale_groups: Literal["wait", "redraw"] = "wait"
    """What happens to a group that is still running when the next batch would find it too old: the batch waits for it,
    at most episode_timeout_s, so that slow rows train as often as fast ones; or it is thrown away and drawn again."""

    failed_group_retries: Annotated[int, Field(ge=0)] = 1
    """Times a row is drawn again after its group failed."""

    max_empty_batches: Positive = 10
    """Stop when this many batches' worth of groups in a row end with none accepted."""

    episode_timeout_s: Seconds = 3600.0
    """Wall-clock limit of one group's episodes in seconds, tools included."""

    request_retries: Positive = 4
    """Tries of one request over all servers before it fails."""

    connect_timeout_s: Seconds = 5.0
    """Seconds to connect to a server."""

    request_timeout_s: Seconds = 600.0
    """Seconds a server may stay silent on one request."""

    max_connections_per_server: Positive = 512
    """Sockets kept open to one server; more requests wait their turn."""

    gconfig: Sampling = field(default_factory=GenerationHyperparameters)
    """Sampling of training episodes where the agent does not say."""

    eval_gconfig: Sampling = field(default_factory=lambda: GenerationHyperparameters(greedy=True))
    """Sampling of evaluation episodes where the agent does not say."""

    agent_workflow: str = "areal_lite.agents.agent_workflow.AgentWorkflow"
    """Dotted path of the workflow that carries an object with ``async run()``."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EmbeddedServerConfig:
    """Settings of the embedded server, for a run, for ``areal-lite serve`` and for ``EmbeddedServer``."""

    host: str = "127.0.0.1"
    """Address to listen on. The server has no authentication: on anything but loopback, others can generate and
    change weights."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 takes a free one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16"
    """Number format of the served weights; auto takes the one in config.json."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes a GPU if there is one."""

    num_threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the model; 0 takes half of the cores, or all of them in an on-policy run, where server and
    trainer take turns."""

    max_running_requests: Positive = 64
    """Requests decoded together; more wait in a queue."""

    max_total_tokens: Positive | None = None
    """Limit on prompt plus max_new_tokens, summed over running requests; null is what the KV cache holds."""

    max_prefill_tokens: Positive | None = None
    """Prompt tokens, padding included, computed in one step while running requests wait; null is 512 on a CPU and
    8192 on a GPU."""

    context_length: Annotated[int, Field(ge=16)] | None = None
    """Most tokens of prompt and answer together; null is the model's own limit."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClassConfig:
    """A class of the user's."""

    path: str
    """A Python file, or the dotted path of a module."""

    name: str
    """Name of the class in it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RowsConfig:
    """Where rows come from, and in which order."""

    path: str | list[str]
    """Files (parquet, json, jsonl, csv, arrow; compressed, globs, SPLIT@PATH, a list of them), a dataset of the
    hub, reasoning-gym:TASK, or the dotted path of a function that returns rows."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reasoning-gym task or of the function (size, seed, ...)."""

    max_samples: Positive | None = None
    """Use only so many rows: the first ones, or, with shuffle, a choice made from the run's seed."""

    shuffle: bool = True
    """Draw each epoch in an order made from (seed, epoch); false keeps the order of the rows."""

    cache_dir: str | None = None
    """Folder for copies of remote files; null is ~/.cache/areal_lite."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DatasetConfig(RowsConfig):
    """Where rows come from, and how a prompt becomes tokens where the data path tokenizes it."""

    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of messages."""

    label_key: str | None = None
    """Column that becomes a sample's label."""

    image_key: str = "images"
    """Column of the images that <image> in a message stands for."""

    video_key: str = "videos"
    """Column of the videos that <video> in a message stands for."""

    tools_key: str = "tools"
    """Column of tool schemas that the chat template renders."""

    max_prompt_length: Positive | None = None
    """Tokens of a prompt, padding included, where the data path tokenizes it; filter_overlong_prompts drops rows by
    it. Null neither pads, cuts nor drops."""

    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a longer prompt: an error, or which part of it is cut away."""

    filter_overlong_prompts: bool = False
    """Drop rows whose prompt is longer than max_prompt_length, at the start."""

    filter_overlong_prompts_workers: Positive = 1
    """Processes that measure prompts."""

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra variables of the chat template, or another chat_template."""

    return_raw_chat: bool = False
    """Add raw_prompt, the messages, to each item."""

    return_full_prompt: bool = False
    """Add full_prompts, the rendered text, to each item."""

    custom_cls: ClassConfig | None = None
    """Your own torch Dataset class, made with data_files, tokenizer, processor and config."""

    sampler: ClassConfig | None = None
    """Your own curriculum, which orders the rows: a subclass of areal_lite.data.rows.samplers.AbstractSampler."""

    datagen: ClassConfig | None = None
    """Your own data generator: adds training rows after each step."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationConfig:
    """When the held-out rows are run; always at the end."""

    at_start: bool = True
    """Also before the first training step."""

    every_steps: Positive | None = None
    """Also after every so many training steps."""

    group_size: Positive = 1
    """Episodes per held-out row."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """What a run saves to go on from: weights, optimizer, and where the data stands."""

    every_steps: Positive | None = None
    """Save after every so many training steps, and after the last; null saves none."""

    keep: Positive = 2
    """Newest checkpoints that stay."""

    expiry_margin_s: Seconds = 120.0
    """Where the platform says when it takes the machine back: seconds before that, and before the longest step so
    far, to save once more."""

    resume: str = "auto"
    """auto goes on from the newest checkpoint of the run's folder, never refuses a folder that holds any, and a path is
    that checkpoint."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExperimentConfig:
    """What every run has, whatever it trains."""

    experiment_name: PathName
    """Folder of the experiment below fileroot."""

    trial_name: PathName = "trial"
    """Folder of this run below the experiment."""

    fileroot: str = "runs"
    """Folder that holds everything a run writes."""

    model_path: str
    """Folder of a Hugging Face model with its tokenizer, or a hub name."""

    seed: Annotated[int, Field(ge=0)] = 1
    """Seed of data order, sampling and training."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What to save for a later start."""

    tracking: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    """Where metrics go beside metrics.jsonl; each needs its extra: pip install -e '.[wandb]'."""

    save_model: bool = True
    """Save the trained model with its tokenizer at the end."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig(ExperimentConfig):
    """One experiment of reinforcement learning: the whole YAML."""

    workflow: str
    """Dotted path of a workflow or of an agent class with ``async run()``."""

    workflow_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of its constructor; gconfig and tokenizer are filled in where it takes them."""

    should_accept_fn: str | None = None
    """Dotted path of a filter: trajectory -> bool or FilterDecision, called once per group; false rejects it.
    areal_lite.data.source.dynamic_filters.nonzero_reward_std keeps groups whose rewards differ."""

    data_packer: str | None = None
    """Dotted path of the DataPacker that turns rows into workflow input and trajectories into training samples;
    null: the one of the model's type."""

    buffer_filter: str | None = None
    """Dotted path of the function that chooses which groups given back are drawn first; null: the oldest."""

    train_dataset: DatasetConfig
    """Rows to train on."""

    eval_dataset: DatasetConfig | None = None
    """Held-out rows; null skips evaluation."""

    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """The generating side."""

    server: EmbeddedServerConfig = field(default_factory=EmbeddedServerConfig)
    """The embedded server."""

    trainer: TrainerConfig
    """The learning side."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """When to evaluate."""

    reward_model: str | None = None
    """Folder of a sequence classifier of one label that judges whole sequences in place of the workflow's rewards."""

    rollout_cache: str | None = None
    """Folder of batches: a step's batch is kept there, and generated only where it is missing."""

    dump_scores: bool = False
    """Write what was asked, answered and scored at each step to scores/STEP.jsonl."""

    profile_steps: list[Positive] = field(default_factory=list)
    """Steps whose torch profile is written to profile/."""
