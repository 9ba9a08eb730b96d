"""The top of a run's YAML: its sections, when it evaluates and what it saves."""

from dataclasses import field
from typing import Annotated, Any, Literal
from pydantic import Field
from pydantic.dataclasses import dataclass
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.rollout_config import FolderName, InferenceEngineConfig, RunIdentity
from areal_lite.config.schema import STRICT, Above0, Count, LocalOrName, Positive
from areal_lite.config.server_config import ServerConfig
from areal_lite.config.trainer_config import TrainerConfig


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
    """Where a platform announces when the machine expires: save this many seconds plus the longest step before."""
    resume: LocalOrName = "auto"
    """auto resumes from the newest checkpoint of the run, never does not resume, and a path names a checkpoint."""

    @property
    def enabled(self) -> bool:
        """Whether the run makes checkpoints."""
        return self.every_minutes is not None or self.every_steps is not None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClusterConfig:
    """The nodes of a run with ``launch: ray``."""

    n_nodes: Positive = 1
    """Nodes that the cluster must have before anything starts; the run waits ray.start_timeout_s for them."""
    n_gpus_per_node: Count = 0
    """GPUs of a node for the servers and ranks that the run starts; 0 starts them on CPUs."""
    n_ranks: Count = 0
    """Trainer ranks to start on the nodes, each with a GPU if nodes have some; all start again from the newest
    checkpoint if one of them ends. 0 trains in the process of the command, or of torchrun."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RayConfig:
    """The Ray cluster of a run with ``launch: ray``."""

    address: str | None = None
    """HOST:PORT of the cluster's head. Null: the environment variable RAY_ADDRESS, else a local Ray that the run starts
    and stops. A cluster that neither names is never joined."""
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """Runtime environment of the programs, as Ray defines it. Without working_dir, nodes have the working directory at
    the same path; with it, Ray copies it to them, without .git, .venv and runs."""
    start_timeout_s: Above0 = 120.0
    """Seconds to wait for nodes and for free CPUs and GPUs, and for a program to start on its node."""
    max_failures: Count = 3
    """Times that the ranks of cluster.n_ranks start again after one of them has ended."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OlderPolicyConfig:
    """An older version of the policy on its own server, an opponent or a judge: it answers the agent older-policy."""

    every_steps: Positive | None = 50
    """Steps after which it gets the newest weights. Null: it keeps those that the run began with."""
    max_concurrent_requests: Positive | None = None
    """Requests that it gets at once from all episodes; others wait. Null: no limit."""
    addresses: list[str] = field(default_factory=list)
    """HOST:PORT of its running servers, of rollout.backend. Empty: the run starts one like its own, on the last GPU."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExperimentConfig(RunIdentity):
    """Settings of every kind of run."""

    experiment_name: FolderName = field()  # required in a YAML
    seed: Annotated[int, Field(ge=0)] = 1

    model_path: LocalOrName
    """Folder or hub name of a Hugging Face model with its tokenizer."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints and resuming."""
    tracking: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    """Metric trackers beside metrics.jsonl; each needs its extra: pip install -e '.[wandb]'."""
    save_model: bool = True
    """Save the trained model and its tokenizer at the end."""
    launch: Literal["local", "ray"] = "local"
    """Where servers, rollout workers and cluster.n_ranks start: local on this machine, ray on the nodes of a Ray
    cluster, which needs an extra: pip install -e '.[ray]'."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The nodes of a run with launch: ray."""
    ray: RayConfig = field(default_factory=RayConfig)
    """The Ray cluster of a run with launch: ray."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig(ExperimentConfig):
    """The YAML of a reinforcement learning run."""

    env: str | None = None
    """Environment that gives the workflow and the rows left out here: gymnasium:ID, textarena:ID, reasoning-gym:TASK,
    mcp:COMMAND or the dotted path of a class. workflow_kwargs go to the loop, their kwargs to the environment."""
    workflow: str | None = None
    """Dotted path of a workflow, or of an agent class with ``async run()``. Null: Python code passes it to
    areal_lite.Trainer(...).train."""
    workflow_kwargs: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments of the workflow. gconfig and tokenizer are filled in if it takes them."""
    should_accept_fn: str | None = None
    """Dotted path of a filter, called once per group: tensor dict -> bool or FilterDecision; false rejects the group.
    areal_lite.data.source.dynamic_filters.nonzero_reward_std keeps groups whose rewards differ."""
    data_packer: str | None = None
    """Dotted path of the DataPacker, from rows to workflow input and trajectories to training data. Null: by model."""
    buffer_filter: str | None = None
    """Dotted path of a function that chooses which returned groups to run first. Null: oldest first."""
    train_dataset: DatasetConfig
    """Training rows, or a list that mixes environments."""
    rollout_global_dataset: bool = True
    """true: train_dataset is a dataset, with epochs in a shuffled order. false: train_dataset.path names a generator
    function, whose rows come in its order; a resumed run skips as many as were drawn."""
    eval_dataset: DatasetConfig | None = None
    """Held-out rows, or such a list. Null skips evaluation."""
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """Inference servers and episode scheduling."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """The servers that the run starts."""
    older_policy: OlderPolicyConfig | None = None
    """An older version of the policy to play against. Null: none."""
    trainer: TrainerConfig
    """Optimizer, algorithm and losses."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """When to evaluate."""
    reward_model: LocalOrName | None = None
    """Folder of a one-label sequence classifier whose scores replace the workflow's rewards in training."""
    rollout_cache: LocalOrName | None = None
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

    @property
    def reports_truncated(self) -> bool:
        """Whether the servers' log-probs are renormalized over the tokens that top_p, top_k and min_p keep."""
        return "vllm" in (self.rollout.backend, self.server.backend)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig(RunConfig):
    """The YAML of a run without training; that of a training run is one too."""

    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(total_steps=1, learning_rate=1e-6))
    """Ignored, except for deterministic and num_threads."""
