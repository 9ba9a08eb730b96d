"""The ``rollout:`` section: inference servers, scheduling, staleness, faults, agents and rewards."""

import re
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.schema import STRICT, Above0, Count, LocalOrName, Positive, refuse

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _folder_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value!r} becomes a folder: use at most 100 letters, digits, '.', '_' and '-', and begin with a "
            "letter or digit"
        )
    return value


def _written_name(value: Any) -> Any:
    if isinstance(value, float):  # 1.10 and 1.1 are one number
        raise ValueError(f"the number {value} becomes a folder: put it in quotes, such as 'trial_name=\"1.10\"'")
    return value


def _one_answer(gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
    if gconfig.n_samples != 1:
        raise ValueError(
            f"n_samples is {gconfig.n_samples}: a request returns one answer. Remove it and set rollout.group_size "
            "or evaluation.group_size"
        )
    return gconfig


FolderName = Annotated[str, BeforeValidator(_written_name), AfterValidator(_folder_name)]
Sampling = Annotated[GenerationHyperparameters, AfterValidator(_one_answer)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunIdentity:
    """Output folder and seed of a run.

    A YAML sets these at its top, all but the first also in ``rollout`` alone, and both have them. An engine without a
    run has defaults; with the seed None, the server samples unseeded.
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
        return Path(self.fileroot).expanduser() / self.experiment_name / self.trial_name


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FaultsConfig:
    """Retries, patience and timeouts."""

    on_error: Literal["drop_episode", "drop_group", "raise"] = "drop_episode"
    """When an episode of a group fails: train on the others, drop the group, or stop the run."""
    failed_group_retries: Count = 1
    """Times to retry a row after its group failed."""
    max_empty_batches: Positive = 10
    """Stop the run if no group is accepted within this many batches' worth of groups."""
    episode_timeout_s: Above0 = 3600.0
    """Wall-clock limit in seconds for the episodes of a group, tool calls included."""
    outage_patience_s: Above0 = 300.0
    """Seconds that requests and weight updates wait while no server is healthy, before the run ends."""
    connect_timeout_s: Above0 = 5.0
    """Timeout in seconds for connecting to a server."""
    request_timeout_s: Above0 = 600.0
    """Seconds without data from a server, for any of its requests, before they go to another server; a stream that has
    begun is counted alone. A server that also leaves health probes unanswered is given up after 2 to 3 minutes."""
    min_stream_tokens_per_s: Above0 = 0.02
    """Slowest stream that is not given up, once it has begun; it may pause for request_timeout_s."""
    max_connections_per_server: Positive = 512
    """Limit of connections per server for generations; further ones queue. The control plane has its own."""
    probe_every_steps: Count = 0
    """Compare each server's log-probs of a short answer with the trainer's every so many steps, and warn of a server
    that is further away than rounding explains; 0 compares at the start only."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AgentsConfig:
    """How agents are called, and how their tools and answers are written and read."""

    workflow: str = "areal_lite.agents.agent_workflow.AgentWorkflow"
    """Dotted path of the workflow that wraps an agent (any object with ``async run()``)."""
    isolation: Literal["inline", "thread", "process"] = "inline"
    """Where an agent's run() is called: inline on the event loop of all episodes, where nothing may block; in its own
    thread, which may; or in its own process, killed at the deadline. thread and process also take ``def run()``."""
    processes: Positive | None = None
    """Maximum number of processes with isolation: process, per worker; further episodes wait. Null: two per core."""
    sandbox: Annotated[str, Field(pattern="^(none|bubblewrap|docker:.+)$")] = "none"
    """Box for each program that an agent runs, an MCP server, and an environment in a process: bubblewrap, or
    docker:IMAGE. No network, read-only files but for the program's folder, a /tmp of its own, limits for the box."""
    tool_parser: (
        Literal["hermes", "qwen3_coder", "function_tag", "llama3", "mistral", "deepseek", "glm45", "fenced_json"] | None
    ) = None
    """Format of the tool calls in an agent's answers. Null chooses it by the chat template."""
    reasoning_parser: Literal["think", "none"] | None = None
    """think moves <think>...</think> of an agent's answers into reasoning_content, none leaves it in the content. Null
    is think if the chat template mentions <think>."""
    tools_in_system_prompt: bool = False
    """Write tools into the system prompt, and calls and results as text (Hermes form), for templates without tools."""
    train_agents: list[str] | None = None
    """Names of the agents whose answers train, such as [main]; others are only dumped. Null: all train."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardsConfig:
    """The reward of an agent or reward function that returns a dict of named parts. Numbers of an agent's dict, and the
    part key of any other, are metrics, rollout/reward/NAME."""

    weights: dict[str, float] | None = None
    """Weight of each part of an agent's reward by name: the reward is the weighted sum. Null: no weighted sum."""
    key: str | None = None
    """Name of the part that is the reward. Null: no single part is; of a reward function it is score."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class InferenceEngineConfig(RunIdentity):
    """Inference servers, episode scheduling and the staleness bound."""

    backend: Literal["sglang", "vllm", "embedded"] = "embedded"
    """Protocol of the servers in addresses."""
    addresses: list[str] = field(default_factory=list)
    """host:port of each running server, or of one sglang-router as in router. Empty: the run starts its own servers."""
    router: str | None = None
    """host:port of an sglang-router in front of the SGLang servers in addresses: generation goes through it, weights go
    to the servers. The engine adds its servers to it and removes those with outdated weights."""
    weight_update: Literal["auto", "disk", "memory", "broadcast", "adapter"] = "auto"
    """How servers get new weights: as files in the run's folder; in memory of the trainer, which servers on the same
    machine map (several times faster); over a process group of the trainer and each server, by NCCL or gloo; or only
    the adapters of trainer.lora, as files. auto is memory for servers that the run starts, files for others."""
    weight_update_pause: Literal["abort", "keep"] = "abort"
    """Running answers during a weight update: abort and resend them with their tokens, or keep and recompute them."""
    tokenizer_path: LocalOrName | None = None
    """Tokenizer for agents and for the text in dumps. Null uses the tokenizer of model_path."""
    dump_to_file: bool = False
    """Write every episode to fileroot/experiment/trial/[rollout|eval-rollout]/version/task_id.jsonl."""
    group_size: Positive = 1
    """Episodes per dataset row. Group-based advantages compare their rewards."""
    consumer_batch_size: Positive = 1
    """Groups per training batch."""
    max_concurrent_rollouts: Positive | None = None
    """Maximum number of groups running at once. Null: only the staleness bound limits them."""
    max_head_offpolicyness: Count = 0
    """Staleness bound: maximum policy versions between a trajectory's oldest trained token and the version
    that trains on it. 0 is on-policy: generation waits for every weight update."""
    over_sampling_groups: Count = 0
    """Extra groups to start beyond a batch; the first to finish are trained. On-policy, a full batch stops the rest,
    which run first for the next one: from their tokens with mask_offpolicy_in_partial_rollout."""
    gen_batch_size: Positive | None = None
    """Groups to generate at once for a batch; sets over_sampling_groups to what exceeds consumer_batch_size."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Mask tokens beyond the staleness bound and train on the rest."""
    stale_groups: Literal["wait", "redraw"] = "wait"
    """For a running group that would be too old for the next batch: wait for it (at most faults.episode_timeout_s), so
    that slow rows train as often as fast ones, or discard it and draw its row again."""
    request_retries: Positive = 4
    """Failed answers to a request, from all servers, after which it fails. A server that cannot be reached, says HTTP
    429, 502, 503 or 504, or falls silent does not count: the request goes to another one or waits."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that run whole groups, for agents that block or keep a core busy; 1 runs them in the run's process."""
    turn_rewards: Literal["sum", "mean", "last"] = "sum"
    """Reward of an episode whose answers are rewarded one by one; gamma of turn_returns discounts the sum."""
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    """Retries, patience and timeouts."""
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    """Isolation, tools and parsers of agents."""
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    """Rewards of named parts."""
    gconfig: Sampling = field(default_factory=GenerationHyperparameters)
    """Default sampling parameters of training episodes."""
    eval_gconfig: Sampling = field(default_factory=lambda: GenerationHyperparameters(greedy=True))
    """Default sampling parameters of evaluation episodes."""

    def __post_init__(self) -> None:
        routed, groups, size = self.router is not None, self.max_concurrent_rollouts, self.consumer_batch_size
        refuse(
            {
                f"gen_batch_size is {self.gen_batch_size} and over_sampling_groups {self.over_sampling_groups}: both "
                "set the same thing, so remove one": self.gen_batch_size is not None and self.over_sampling_groups > 0,
                f"workers is {self.workers} and max_concurrent_rollouts {groups}: a group runs in one worker, so some "
                "would have nothing to do. Use fewer workers, or allow more groups": (
                    groups is not None and groups < self.workers
                ),
                f"gen_batch_size is {self.gen_batch_size}, below consumer_batch_size {size}: a batch would not fill. "
                f"To run fewer groups at once, set max_concurrent_rollouts: {self.gen_batch_size}": (
                    self.extra_groups < 0
                ),
                f"rollout.router is an sglang-router, and rollout.backend is {self.backend}: only SGLang servers can "
                "be behind one": routed and self.backend != "sglang",
                "rollout.router is set and rollout.addresses is empty: name the servers behind the router too, because "
                "weights go to them directly; or let the run start both with server.router: true": (
                    routed and not self.addresses
                ),
                "rollout.weight_update is adapter, and rollout.router is set: each server has its own names of "
                "adapters, and a request through the router cannot know its server. Use another weight_update, or no "
                "router": routed and self.weight_update == "adapter",
            }
        )

    @property
    def request_timeout(self) -> float:
        """``faults.request_timeout_s``, by the name that AReaL's workflows read."""
        return self.faults.request_timeout_s

    @property
    def extra_groups(self) -> int:
        """Groups that start beyond a batch."""
        size = self.gen_batch_size
        return self.over_sampling_groups if size is None else size - self.consumer_batch_size
