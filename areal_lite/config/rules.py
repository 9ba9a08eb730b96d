"""Rules across sections that need only the config: no model, no rows, no network, no running server.

A rule within one section is in its ``__post_init__``, where the loader and Python code meet it alike. These depend on
the command too (a greedy rollout is fine, a greedy training run is not), so a run calls them, before it starts
anything: :func:`check_rollouts` for every run with rollouts, :func:`check_training` for one that trains.
"""

import logging
from areal_lite.config.dataset_config import DatasetConfig, refuse_idle
from areal_lite.config.generation import CONSTRAINTS, GenerationHyperparameters
from areal_lite.config.run_config import ClusterConfig, ExperimentConfig, RayConfig, RunConfig
from areal_lite.config.schema import refuse
from areal_lite.config.server_config import ServerConfig, tensor_parallel_size
from areal_lite.errors import ConfigError

logger = logging.getLogger(__name__)
_NEED_DATASET = ("shuffle", "max_samples", "filter_overlong_prompts", "custom_cls", "sampler", "datagen")
_TRAINING_ONLY = {
    "datagen": "it adds rows after each training step",
    "sampler": "held-out rows all run, in the order of the file",
}


def check_rollouts(config: RunConfig) -> None:
    """Check what every run with rollouts needs; raises ConfigError."""
    rollout, server, rewards = config.rollout, config.server, config.rollout.rewards
    running, given = bool(rollout.addresses), config.workflow_kwargs
    refuse(
        {
            "server.router is true and rollout.weight_update is adapter: requests through a router cannot name the "
            "adapter of the server that answers. Use one of the two": (
                server.router and rollout.weight_update == "adapter"
            ),
            "server.router is for servers that the run starts, and rollout.addresses names running ones: set "
            "rollout.router to the address of their router": server.router and running,
            f"server.backend is {server.backend}, which starts servers, and rollout.addresses names running ones: "
            "remove one of the two": server.backend is not None and running,
            f"rollout.backend is {rollout.backend} and rollout.addresses is empty: name the running servers "
            f"(rollout.addresses=[127.0.0.1:30000]), or have the run start them (server.backend={rollout.backend})": (
                rollout.backend not in ("embedded", server.backend) and not running
            ),
            f"rollout.agents.sandbox is {rollout.agents.sandbox}, which is for the programs of an agent alone, and "
            f"workflow_kwargs has env {given.get('env')} and isolation {given.get('isolation')}: use bubblewrap": (
                rollout.agents.sandbox.startswith("docker")
                and (str(given.get("env")).startswith("mcp:") or given.get("isolation", "inline") != "inline")
            ),
            "rollout.agents.isolation is thread, and environments take turns at the process's random state: one that "
            "blocks would stop all. Remove it, and set workflow_kwargs.isolation: process": (
                rollout.agents.isolation == "thread" and str(config.workflow).endswith(".EnvironmentAgent")
            ),
            "workflow_kwargs.opponent is older, and older_policy is null: set older_policy.every_steps": (
                config.older_policy is None and "older" in (o if isinstance(o := given.get("opponent"), list) else [o])
            ),
            f"rollout.rewards.key is {rewards.key!r} and rollout.rewards.weights {rewards.weights}: the reward is one "
            "part or a sum of parts; remove one of the two": rewards.key is not None and bool(rewards.weights),
        }
    )
    check_launch(config)
    if not config.rollout_global_dataset:
        _check_generator(config)
    _check_rows(config)


def held_out_rows(config: RunConfig) -> DatasetConfig:
    """Return the section of the rows to evaluate on; raises ConfigError if there is none."""
    if config.eval_dataset is None:
        raise ConfigError("eval_dataset is missing: give the rows to evaluate on (eval_dataset.path=rows.jsonl)")
    return config.eval_dataset


def check_rows_end(config: RunConfig) -> None:
    """Check that the training rows end, so that all of them can be run; raises ConfigError."""
    if not config.rollout_global_dataset:
        raise ConfigError(
            "rollout_global_dataset is false: the rows of a generator do not end, so they cannot all be run. Use "
            "areal-lite train, or rollout_global_dataset: true with a function that returns a list"
        )


def check_launch(config: ExperimentConfig) -> None:
    """Refuse keys of a cluster that nothing reads, and keys of servers that their nodes choose."""
    on_ray, gpus, ranks = config.launch == "ray", config.cluster.n_gpus_per_node, config.cluster.n_ranks
    server = config.server if isinstance(config, RunConfig) else ServerConfig()
    size = tensor_parallel_size(server)
    starts = isinstance(config, RunConfig) and (not config.rollout.addresses or config.rollout.workers > 1)
    refuse(
        {
            "cluster or ray is set, and launch is local, which starts everything on this machine: set launch: ray, or "
            "remove them": not on_ray and (config.cluster != ClusterConfig() or config.ray != RayConfig()),
            "launch is ray, and there is nothing to start: no servers, no rollout.workers and no ranks. Set "
            "cluster.n_ranks, or remove launch": on_ray and not starts and not ranks,
            "launch is ray, and server.host or server.port is set: servers listen on a free port of their node. "
            "Remove both": on_ray and (server.host != ServerConfig.host or bool(server.port)),
            f"cluster.n_gpus_per_node is {gpus}, and server.args gives each server {size} GPUs: a server runs on one "
            "node": 0 < gpus < size,
            f"cluster.n_ranks is {ranks}, and checkpoint.resume {config.checkpoint.resume}: ranks start again from the "
            "newest checkpoint. Set resume: auto": ranks > 0 and config.checkpoint.resume != "auto",
        }
    )


def _check_generator(config: RunConfig) -> None:
    where, rows = "rollout_global_dataset is false, so rows come from a generator function", config.train_dataset
    if config.trainer.total_epochs is not None:
        raise ConfigError(
            f"trainer.total_epochs is {config.trainer.total_epochs}, and rollout_global_dataset is false: the rows "
            "of a generator have no known number, so set trainer.total_steps instead"
        )
    if not isinstance(rows.path, str):
        raise ConfigError(f"{where}, and train_dataset.path is {rows.path!r}: write one dotted path")
    for name in _NEED_DATASET:
        if value := getattr(rows, name):
            fix = f"set train_dataset.{name}: false" if value is True else f"remove train_dataset.{name}"
            raise ConfigError(f"{where}, and train_dataset.{name} is {value!r}, which needs a dataset: {fix}")


def _check_rows(config: RunConfig) -> None:
    """Refuse keys of rows that nothing reads, whatever the workflow is; ``runs`` looks at what the workflow reads."""
    for name, rows in (("train_dataset", config.train_dataset), ("eval_dataset", config.eval_dataset)):
        if rows is None:
            continue
        faults = dict(_TRAINING_ONLY) if name == "eval_dataset" else {}
        if not rows.filter_overlong_prompts:
            faults["filter_overlong_prompts_workers"] = "filter_overlong_prompts is false: set it"
        own_code = config.data_packer is not None or rows.custom_cls is not None  # which may read any key
        if not own_code and rows.filter_overlong_prompts:
            faults["truncation"] = "filter_overlong_prompts drops the prompts that it would cut: remove one"
        elif not own_code and rows.max_prompt_length is None:
            faults["truncation"] = "max_prompt_length is null, so no prompt is too long: set it"
        refuse_idle(name, rows, faults)


def check_training(config: RunConfig) -> None:
    """Check that groups can be trained on, and warn where servers and trainer compute different log-probs."""
    rollout, trainer = config.rollout, config.trainer
    groups, minibatches = rollout.consumer_batch_size, trainer.minibatches_per_step
    refuse(
        {
            f"trainer.minibatches_per_step is {minibatches} and rollout.consumer_batch_size {groups}: a minibatch has "
            "whole groups, so some would be empty. Use fewer minibatches, or more groups": minibatches > groups,
            "rollout.gconfig is greedy: all episodes of a group would be equal and every advantage 0. Set greedy: "
            "false and a temperature above 0": rollout.gconfig.effective_temperature == 0,
            f"rollout.gconfig.temperature is {rollout.gconfig.effective_temperature:g}, and servers score a teacher's "
            "tokens at temperature 1, so the two would not compare: set it to 1, or remove trainer.kl.teacher": (
                trainer.kl is not None and trainer.kl.teacher is not None and rollout.gconfig.effective_temperature != 1
            ),
            "rollout.weight_update is adapter, and there are no adapters: set trainer.lora, or weight_update: auto": (
                rollout.weight_update == "adapter" and trainer.lora is None
            ),
            "trainer.proximal is 'behaviour', but the log-probs of these servers ignore top_p, top_k and min_p of "
            "rollout.gconfig: set trainer.proximal: trainer, or remove them": (
                rollout.gconfig.is_truncated and trainer.proximal == "behaviour" and not config.reports_truncated
            ),
        }
    )
    if groups_left := groups % minibatches:
        logger.warning(
            "trainer.minibatches_per_step %d does not divide rollout.consumer_batch_size %d: %d minibatches have %d "
            "groups and the others %d, all with the same learning rate",
            *(minibatches, groups, groups_left, groups // minibatches + 1, groups // minibatches),
        )
    _warn_of_mismatch(config)


def _warn_of_mismatch(config: RunConfig) -> None:
    rollout = config.rollout
    whole = rollout.weight_update != "adapter"
    if whole and config.trainer.dtype == "float32" and config.server.dtype in ("bfloat16", "float16"):
        logger.warning(
            "trainer.dtype is float32 and server.dtype %s: published weights are rounded, which undoes most of a small "
            "update for the servers; set server.dtype: float32",
            config.server.dtype,
        )
    if config.trainer.dtype != "float32" and config.server.dtype == "float32":
        logger.warning(
            "trainer.dtype is %s and server.dtype float32: a trainer in bfloat16 rounds small updates away, which the "
            "servers see, so that log-probs soon differ by several nats; set trainer.dtype: float32",
            config.trainer.dtype,
        )
    names = ("min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
    changed = [
        name
        for name in (*names, *CONSTRAINTS)
        if getattr(rollout.gconfig, name) != getattr(GenerationHyperparameters, name)
    ]
    if changed:
        logger.warning(
            "rollout.gconfig changes %s: tokens are sampled from a different distribution than the one their log-probs "
            "describe, and neither corrections nor metrics account for it. Keep the defaults while training",
            ", ".join(changed),
        )
