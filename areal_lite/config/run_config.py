"""The top of a run's YAML: its sections, when it evaluates and what it saves."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.schema import STRICT, Above0, Count, Positive
from areal_lite.config.trainer_config import TrainerConfig as TrainerConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _folder_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value!r} becomes a folder: use at most 100 letters, digits, '.', '_' and '-', and begin with a "
            "letter or digit"
        )
    return value


def _one_answer(gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
    if gconfig.n_samples != 1:
        raise ValueError(
            f"n_samples is {gconfig.n_samples}: a request returns one answer. Remove it and set rollout.group_size "
            "or evaluation.group_size"
        )
    return gconfig


FolderName = Annotated[str, AfterValidator(_folder_name)]
Sampling = Annotated[GenerationHyperparameters, AfterValidator(_one_answer)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunIdentity:
    """Where a run writes, and its seed.

    A YAML sets these at the top, or in ``rollout`` alone, and both have them. An engine without a run has defaults;
    with the seed None, the server samples unseeded.
    """

    experiment_name: FolderName = "experiment"
    """Folder of the experiment under fileroot."""

    trial_name: FolderName = "trial"
    """Folder of this run under the experiment."""

    fileroot: str = "runs"
    """Root folder of all output."""

    seed: int | None = None
    """Seed of data order, sampling and training."""

    @property
    def run_dir(self) -> Path:
        """``fileroot/experiment_name/trial_name``."""
        return Path(self.fileroot) / self.experiment_name / self.trial_name


@dataclass(frozen=True, kw_only=True, config=STRICT)
class InferenceEngineConfig(RunIdentity):
    """Inference servers, episode scheduling and the staleness bound."""

    backend: Literal["sglang", "vllm", "embedded"] = "embedded"
    """Protocol of the servers in addresses."""

    addresses: list[str] = field(default_factory=list)
    """host:port of each running server, or of one sglang-router, whose servers are then used as with router. Empty: the
    run starts its own, see server.backend."""

    router: str | None = None
    """host:port of an sglang-router in front of the SGLang servers in addresses: generation goes through it, weights go
    to the servers directly. The engine adds its servers to the router's and removes those with outdated weights."""

    weight_update: Literal["auto", "disk", "memory", "broadcast", "adapter"] = "auto"
    """How servers get new weights: as files in the run's folder; in memory of the trainer, which servers on the same
    machine map (several times faster); over a process group of the trainer and each server, NCCL between GPUs, gloo
    otherwise; or, with trainer.lora, only the adapters, as files. auto takes memory for a server that the run starts,
    files for others."""

    weight_update_pause: Literal["abort", "keep"] = "abort"
    """Running answers during a weight update: abort and send them again with their tokens, or keep them on the server,
    which computes their states again."""

    tokenizer_path: str | None = None
    """Tokenizer for agents and for the text in dumps. Null uses the tokenizer of model_path."""

    dump_to_file: bool = False
    """Write every episode to fileroot/experiment/trial/[rollout|eval-rollout]/version/task_id.jsonl."""

    group_size: Positive = 1
    """Episodes per dataset row. Group-based advantages compare their rewards."""

    on_error: Literal["drop_episode", "drop_group", "raise"] = "drop_episode"
    """When an episode of a group fails: train on the others, drop the group, or stop the run."""

    consumer_batch_size: Positive = 1
    """Groups per training batch."""

    max_concurrent_rollouts: Positive | None = None
    """Maximum number of groups running at once. Null: only the staleness bound limits them."""

    max_head_offpolicyness: Count = 0
    """Staleness bound: maximum policy versions between a trajectory's oldest trained token and the version
    that trains on it. 0 is on-policy: generation waits for every weight update."""

    over_sampling_groups: Count = 0
    """Extra groups to start beyond a batch; the first to finish are trained. On-policy, the rest are stopped
    when the batch is full and run first for the next; mask_offpolicy_in_partial_rollout resumes them from their
    tokens."""

    gen_batch_size: Positive | None = None
    """Groups to generate at once for a batch; sets over_sampling_groups to what exceeds consumer_batch_size."""

    mask_offpolicy_in_partial_rollout: bool = False
    """Mask tokens beyond the staleness bound and train on the rest."""

    stale_groups: Literal["wait", "redraw"] = "wait"
    """For a running group that would be too old for the next batch: wait for it (at most episode_timeout_s), so that
    slow rows train as often as fast ones, or discard it and draw its row again."""

    failed_group_retries: Count = 1
    """Times to retry a row after its group failed."""

    max_empty_batches: Positive = 10
    """Stop the run if no group is accepted within this many batches' worth of groups."""

    episode_timeout_s: Above0 = 3600.0
    """Wall-clock limit in seconds for the episodes of a group, tool calls included."""

    probe_every_steps: Count = 0
    """Compare each server's log-probs of a short answer with the trainer's every so many steps, and warn of a server
    that is further away than rounding explains; 0 compares at the start only."""

    request_retries: Positive = 4
    """Failed answers to a request, from all servers, after which it fails. A server that cannot be reached, says HTTP
    429, 502, 503 or 504, or falls silent does not count: the request goes to another one or waits."""

    outage_patience_s: Above0 = 300.0
    """Seconds that requests and weight updates wait while no server is healthy, before the run ends."""

    connect_timeout_s: Above0 = 5.0
    """Timeout in seconds for connecting to a server."""

    request_timeout_s: Above0 = 600.0
    """Seconds without data from a server, for any of its requests, before they go to another server; a stream that has
    begun is counted alone. A server that also leaves health probes unanswered is given up after 2 to 3 minutes."""

    max_connections_per_server: Positive = 512
    """Connection limit per server; further requests queue."""

    gconfig: Sampling = field(default_factory=GenerationHyperparameters)
    """Default sampling parameters of training episodes."""

    eval_gconfig: Sampling = field(default_factory=lambda: GenerationHyperparameters(greedy=True))
    """Default sampling parameters of evaluation episodes."""

    tool_parser: (
        Literal["hermes", "qwen3_coder", "function_tag", "llama3", "mistral", "deepseek", "glm45", "fenced_json"] | None
    ) = None
    """Format of the tool calls in an agent's answers. Null takes the tokenizer's response_template, or else the chat
    template's format."""

    reasoning_parser: Literal["think", "none"] | None = None
    """think moves <think>...</think> of an agent's answers into reasoning_content, none leaves it in the content. Null
    is think if the chat template mentions <think>."""

    tools_in_system_prompt: bool = False
    """Write an agent's tools into the system prompt, and calls and results as text (Hermes form), for chat templates
    that do not render tools."""

    reward_weights: dict[str, float] | None = None
    """Weights of the named parts of a reward: an agent that returns a dict by these names is rewarded with the
    weighted sum, and each part is a metric, rollout/reward/NAME. Null: rewards have no named parts."""

    reward_key: str | None = None
    """Name of the part that is the reward, where an agent returns a dict of named parts; the other numbers in it are
    metrics, rollout/reward/NAME."""

    agent_workflow: str = "areal_lite.agents.agent_workflow.AgentWorkflow"
    """Dotted path of the workflow that wraps an agent (any object with ``async run()``)."""

    agent_isolation: Literal["inline", "thread", "process"] = "inline"
    """Where an agent's run() is called: inline on the event loop of all episodes, where nothing may block; in a
    thread of its own, which may block; or in a process of its own, killed at the deadline. thread and process also
    take a plain ``def run()``."""

    agent_processes: Positive | None = None
    """Maximum number of processes with agent_isolation: process, per worker; further episodes wait. Null: two per
    core."""

    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that run workflows and agents, for code that keeps a core busy or blocks. Each has an event loop of its
    own and runs whole groups; requests to servers stay in the run's process. 1 runs the episodes there too."""

    def __post_init__(self) -> None:
        if self.gen_batch_size is not None and self.over_sampling_groups:
            raise ValueError(
                f"gen_batch_size is {self.gen_batch_size} and over_sampling_groups {self.over_sampling_groups}: both "
                "set the same thing, so remove one"
            )
        if self.max_concurrent_rollouts is not None and self.max_concurrent_rollouts < self.workers:
            raise ValueError(
                f"workers is {self.workers} and max_concurrent_rollouts {self.max_concurrent_rollouts}: a group runs "
                "in one worker, so some would have nothing to do. Use fewer workers, or allow more groups"
            )
        if self.extra_groups < 0:
            raise ValueError(
                f"gen_batch_size is {self.gen_batch_size}, below consumer_batch_size {self.consumer_batch_size}: a "
                f"batch would not fill. To run fewer groups at once, set max_concurrent_rollouts: {self.gen_batch_size}"
            )

    @property
    def extra_groups(self) -> int:
        """Groups that start beyond a batch."""
        size = self.gen_batch_size
        return self.over_sampling_groups if size is None else size - self.consumer_batch_size


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EmbeddedServerConfig:
    """Settings of one embedded server."""

    host: str = "127.0.0.1"
    """Address to listen on. The server has no authentication: on anything but loopback, others can generate and
    change weights."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on, further replicas on the ports after it; 0 takes free ones."""

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
    """Prompt tokens computed in one step, padding included; running requests wait for it. null is 512 on a CPU and 8192
    on a GPU."""

    context_length: Annotated[int, Field(ge=16)] | None = None
    """Maximum tokens of prompt and answer together; null is the model's own limit."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServerConfig(EmbeddedServerConfig):
    """The servers that a run or ``areal-lite serve`` starts."""

    backend: Literal["sglang", "vllm", "embedded"] | None = None
    """Program to start; rollout.backend follows it. Null: the embedded server, or nothing if rollout.addresses names
    running servers."""

    replicas: Positive = 1
    """Number of servers. On a machine with NVIDIA GPUs each gets as many as its tensor parallel size; together they get
    the last GPUs, because trainers use the first."""

    args: dict[str, Any] = field(default_factory=dict)
    """Further options of SGLang or vLLM, by the name of the flag: {tp: 2, mem_fraction_static: 0.8}. true is a flag
    without a value; what the engine needs cannot be changed."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the servers."""

    router: bool = False
    """Start an sglang-router in front of SGLang servers, from the same environment; rollout.router follows it."""

    python: str | None = None
    """Interpreter of an environment with SGLang or vLLM, such as venv/bin/python. Null is that of the run."""

    start_timeout_s: Above0 = 600.0
    """Seconds in which a server must answer its first request."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClassConfig:
    """A user-defined class."""

    path: str
    """A Python file, or the dotted path of a module."""

    name: str
    """Name of the class in it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RowsConfig:
    """Source and order of the dataset rows."""

    path: str | list[str]
    """Files (parquet, json, jsonl, csv, arrow; compressed, globs, SPLIT@PATH, or a list of them), a hub dataset,
    reasoning-gym:TASK, or the dotted path of a function that returns rows."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reasoning-gym task or the function (size, seed, ...)."""

    max_samples: Positive | None = None
    """Limit on the number of rows: the first ones or, with shuffle, a random subset drawn with the run's seed."""

    shuffle: bool = True
    """Shuffle each epoch, seeded by (seed, epoch); false keeps the order of the rows."""

    cache_dir: str | None = None
    """Cache folder for remote files. Null is ~/.cache/areal_lite."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DatasetConfig(RowsConfig):
    """Dataset rows, and how their prompts are tokenized for a workflow that takes them, and for their length."""

    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of messages."""

    label_key: str | None = None
    """Column of the label."""

    metadata_key: str | None = None
    """Column of a dict that becomes Sample.metadata, for buffer_filter; it is saved with the position in the data."""

    image_key: str = "images"
    """Column of the images that replace <image> in a message, for training loops of your own: runs train on text."""

    video_key: str = "videos"
    """Column of the videos that replace <video> in a message, for training loops of your own."""

    tools_key: str = "tools"
    """Column of tool schemas for the chat template."""

    tool_key: str | None = None
    """Another name of tools_key: set one of the two."""

    tools_in_system_prompt: bool = False
    """Write tools into the system prompt, and calls and results as text (Hermes form), for chat templates that do not
    render tools."""

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

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra chat template variables, or chat_template to replace the template."""

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
        if not self.apply_chat_template:
            for name in ("apply_chat_template_kwargs", "tools_in_system_prompt", "return_raw_chat"):
                if value := getattr(self, name):
                    raise ValueError(
                        f"apply_chat_template is false, and {name} is {value!r}, which needs the template: remove it, "
                        "or set apply_chat_template: true"
                    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationConfig:
    """When to evaluate on the held-out rows. A run always evaluates at its end."""

    at_start: bool = True
    """Also evaluate before the first training step."""

    every_steps: Positive | None = None
    """Also evaluate every this many training steps."""

    group_size: Positive = 1
    """Episodes per held-out row."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Checkpoints: weights, optimizer, random states and data position."""

    every_minutes: Above0 | None = 10.0
    """Save after the first step that ends this many minutes after the last save or the start, and after the last step.
    Null saves by every_steps alone; with both null there are no checkpoints."""

    every_steps: Positive | None = None
    """Also save every this many training steps."""

    keep: Positive = 2
    """Number of latest checkpoints to keep."""

    expiry_margin_s: Above0 = 120.0
    """On platforms that announce when the machine expires: save this many seconds, plus the longest step so far, before
    that."""

    resume: str = "auto"
    """auto resumes from the newest checkpoint of the run, never does not resume, and a path names a checkpoint."""

    @property
    def enabled(self) -> bool:
        """Whether the run makes checkpoints."""
        return self.every_minutes is not None or self.every_steps is not None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExperimentConfig(RunIdentity):
    """Settings of every kind of run."""

    experiment_name: FolderName = field()  # required in a YAML
    seed: Annotated[int, Field(ge=0)] = 1

    model_path: str
    """Folder or hub name of a Hugging Face model with its tokenizer."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints and resuming."""

    tracking: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    """Metric trackers beside metrics.jsonl; each needs its extra: pip install -e '.[wandb]'."""

    save_model: bool = True
    """Save the trained model and its tokenizer at the end."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig(ExperimentConfig):
    """The YAML of a reinforcement learning run."""

    workflow: str | None = None
    """Dotted path of a workflow, or of an agent class with ``async run()``. Null: Python code passes it to
    areal_lite.Trainer(...).train."""

    workflow_kwargs: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments of the workflow. gconfig and tokenizer are filled in if it takes them."""

    should_accept_fn: str | None = None
    """Dotted path of a filter, called once per group: tensor dict -> bool or FilterDecision; false rejects the group.
    areal_lite.data.source.dynamic_filters.nonzero_reward_std keeps groups whose rewards differ."""

    data_packer: str | None = None
    """Dotted path of the DataPacker that turns rows into workflow input and trajectories into training data. Null
    selects one by model type."""

    buffer_filter: str | None = None
    """Dotted path of a function that chooses which returned groups to run first. Null: oldest first."""

    train_dataset: DatasetConfig
    """Training rows."""

    rollout_global_dataset: bool = True
    """Whether train_dataset is a dataset, with epochs in a shuffled order. false: train_dataset.path names a generator
    function, whose rows come in its order; a resumed run skips as many as were drawn."""

    eval_dataset: DatasetConfig | None = None
    """Held-out rows. Null skips evaluation."""

    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """Inference servers and episode scheduling."""

    server: ServerConfig = field(default_factory=ServerConfig)
    """The servers that the run starts."""

    trainer: TrainerConfig
    """Optimizer, algorithm and losses."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """When to evaluate."""

    reward_model: str | None = None
    """Folder of a one-label sequence classifier whose scores replace the workflow's rewards in training."""

    rollout_cache: str | None = None
    """Folder that caches the batch of every step; cached batches are not generated again."""

    dump_scores: bool = False
    """Write the prompts, answers and scores of each step to scores/STEP.jsonl."""

    dump_training: bool = False
    """Write log-probs, advantage, importance weight and clipping of each trained token to training/STEP.parquet; view,
    inspect and verify use them."""

    profile_steps: list[Positive] = field(default_factory=list)
    """Steps to profile with torch; traces go to profile/."""

    memory_snapshot_steps: list[Positive] = field(default_factory=list)
    """Steps after which to write what holds memory to memory/, on a GPU with all allocations of the step."""

    @property
    def gconfig(self) -> GenerationHyperparameters:
        """Sampling parameters of training episodes: ``rollout.gconfig``."""
        return self.rollout.gconfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig(RunConfig):
    """The YAML of a run without training; that of a training run is one too."""

    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(total_steps=1, learning_rate=1e-6))
    """Ignored, except for deterministic and num_threads."""
