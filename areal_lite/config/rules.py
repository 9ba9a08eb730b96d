"""Rules across sections that need only the config: no model, no rows, no network, no running server.

A rule within one section is in its ``__post_init__``, where the loader and Python code meet it alike. These depend on
the command too (a greedy rollout is fine, a greedy training run is not), so a run calls them, before it starts
anything: :func:`check_rollouts` for every run with rollouts, :func:`check_training` for one that trains.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.generation import CONSTRAINTS, GenerationHyperparameters
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.config.run_config import RunConfig
from areal_lite.config.server_config import ServerConfig
from areal_lite.errors import ConfigError

logger = logging.getLogger(__name__)
_DEFAULT_ROWS = DatasetConfig(path="")
_EMBEDDED_ONLY = ("max_running_requests", "max_total_tokens", "max_prefill_tokens")
_KEYS_OF_FLAGS = {
    **dict.fromkeys(("model", "model-path", "tokenizer", "tokenizer-path"), "model_path"),
    **dict.fromkeys(("seed", "random-seed"), "seed"),
    **dict.fromkeys(("context-length", "max-model-len"), "server.context_length"),
    **{name: f"server.{name}" for name in ("host", "port", "dtype", "device")},
}
"""The config key of a flag that server.args may not set."""
_NEEDED_FLAGS = {
    "sglang": {"weight-version", "incremental-streaming-output", "api-key", "admin-api-key"},
    "vllm": {"enable-scale-out", "logprobs-mode", "worker-extension-cls", "api-key"},
}
"""Flags whose value the engine needs: token ids in and out, log-probs, versions, weight updates, no key."""
_OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "VLLM_SERVER_DEV_MODE", "SGLANG_RETURN_ORIGINAL_LOGPROB")
_TENSOR_PARALLEL = ("tp", "tp-size", "tensor-parallel-size")
_NEED_DATASET = ("shuffle", "max_samples", "filter_overlong_prompts", "custom_cls", "sampler", "datagen")
_TRAINING_ONLY = {
    "datagen": "it adds rows after each training step",
    "sampler": "held-out rows all run, in the order of the file",
}


def check_engine(config: InferenceEngineConfig) -> None:
    """Check that ``router`` is possible with the other settings; raises ConfigError."""
    if config.router is None:
        return
    if config.backend != "sglang":
        raise ConfigError(
            f"rollout.router is an sglang-router, and rollout.backend is {config.backend}: only SGLang servers can be "
            "behind one"
        )
    if not config.addresses:
        raise ConfigError(
            "rollout.router is set and rollout.addresses is empty: name the servers behind the router too, because "
            "weights go to them directly; or let the run start both with server.router: true"
        )
    if config.weight_update == "adapter":
        raise ConfigError(
            "rollout.weight_update is adapter, and rollout.router is set: each server has its own names of adapters, "
            "and a request through the router cannot know its server. Use another weight_update, or no router"
        )


def check_server(config: ServerConfig) -> None:
    """Check that the program to start has the settings; raises ConfigError."""
    backend = config.backend or "embedded"
    if config.router and backend != "sglang":
        raise ConfigError(
            f"server.router is an sglang-router, and server.backend is {backend}: set server.backend: sglang, or "
            "server.router: false"
        )
    for name in ("args", "python") if backend == "embedded" else ():
        if getattr(config, name):
            raise ConfigError(f"server.{name} is for sglang and vllm, and server.backend is embedded: remove it")
    for name in () if backend == "embedded" else _EMBEDDED_ONLY:
        if getattr(config, name) != getattr(ServerConfig, name):
            raise ConfigError(
                f"server.{name} is a setting of the embedded server, and server.backend is {backend}: put "
                f"{backend}'s own flag into server.args"
            )
    for name in config.args:
        flag = flag_of(name).removeprefix("no-")
        if key := _KEYS_OF_FLAGS.get(flag):
            raise ConfigError(f"server.args sets {name!r}, which comes from {key}: set {key} instead")
        if flag in _NEEDED_FLAGS[backend]:
            raise ConfigError(f"server.args sets {name!r}, whose value the engine needs to be its own: remove it")
    for name in () if backend == "embedded" else _OWN_VARIABLES:
        if name in config.env:
            raise ConfigError(f"server.env sets {name}, which the engine sets itself: remove it")
    tensor_parallel_size(config)


def flag_of(name: str) -> str:
    """Return a name in ``server.args`` as SGLang and vLLM write the flag, without dashes before it."""
    return name.lstrip("-").replace("_", "-")


def tensor_parallel_size(config: ServerConfig) -> int:
    """Return the GPUs of each replica that ``args`` gives; raises ConfigError."""
    size = next((value for name, value in config.args.items() if flag_of(name) in _TENSOR_PARALLEL), 1)
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"server.args gives the tensor parallel size {size!r}: use a whole number from 1")
    return size


def check_rollouts(config: RunConfig) -> None:
    """Check what every run with rollouts needs; raises ConfigError."""
    rollout, server = config.rollout, config.server
    check_engine(rollout)
    if server.router and rollout.weight_update == "adapter":
        raise ConfigError(
            "server.router is true and rollout.weight_update is adapter: requests through a router cannot name the "
            "adapter of the server that answers. Use one of the two"
        )
    if rollout.addresses and server.router:
        raise ConfigError(
            "server.router is for servers that the run starts, and rollout.addresses names running ones: set "
            "rollout.router to the address of their router"
        )
    if rollout.addresses and server.backend is not None:
        raise ConfigError(
            f"server.backend is {server.backend}, which starts servers, and rollout.addresses names running ones: "
            "remove one of the two"
        )
    if not rollout.addresses and rollout.backend not in ("embedded", server.backend):
        raise ConfigError(
            f"rollout.backend is {rollout.backend} and rollout.addresses is empty: name the running servers "
            f"(rollout.addresses=[127.0.0.1:30000]), or have the run start them (server.backend={rollout.backend})"
        )
    if rollout.rewards.key is not None and rollout.rewards.weights:
        raise ConfigError(
            f"rollout.rewards.key is {rollout.rewards.key!r} and rollout.rewards.weights "
            f"{dict(rollout.rewards.weights)}: the reward is one part or a sum of parts; remove one of the two"
        )
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


def refuse_idle(section: str, rows: DatasetConfig, faults: Mapping[str, str]) -> None:
    """Refuse the keys of a dataset section that are set and would do nothing, for the reasons ``faults``."""
    idle = {name: getattr(rows, name) for name in faults if getattr(rows, name) != getattr(_DEFAULT_ROWS, name)}
    if idle:
        raise ConfigError(
            "; ".join(
                f"{section}.{name} is {value!r}, but would do nothing: {faults[name]}" for name, value in idle.items()
            )
        )


def reports_truncated(config: RunConfig) -> bool:
    """Return whether the servers' log-probs are renormalized over the tokens that top_p, top_k and min_p keep."""
    return "vllm" in (config.rollout.backend, config.server.backend)


def check_training(config: RunConfig) -> None:
    """Check that groups can be trained on, and warn where servers and trainer compute different log-probs."""
    rollout, minibatches = config.rollout, config.trainer.minibatches_per_step
    groups = rollout.consumer_batch_size
    if minibatches > groups:
        raise ConfigError(
            f"trainer.minibatches_per_step is {minibatches} and rollout.consumer_batch_size {groups}: a minibatch has "
            "whole groups, so some would be empty. Use fewer minibatches, or more groups"
        )
    if groups_left := groups % minibatches:
        logger.warning(
            "trainer.minibatches_per_step %d does not divide rollout.consumer_batch_size %d: %d minibatches have %d "
            "groups and the others %d, all with the same learning rate",
            *(minibatches, groups, groups_left, groups // minibatches + 1, groups // minibatches),
        )
    if rollout.gconfig.effective_temperature == 0:
        raise ConfigError(
            "rollout.gconfig is greedy: all episodes of a group would be equal and every advantage 0. Set greedy: "
            "false and a temperature above 0"
        )
    if rollout.weight_update == "adapter" and config.trainer.lora is None:
        raise ConfigError(
            "rollout.weight_update is adapter, and there are no adapters: set trainer.lora, or weight_update: auto"
        )
    _check_log_probs(config)


def _check_log_probs(config: RunConfig) -> None:
    rollout = config.rollout
    if rollout.gconfig.is_truncated and config.trainer.proximal == "behaviour" and not reports_truncated(config):
        raise ConfigError(
            "trainer.proximal is 'behaviour', but the log-probs of these servers ignore top_p, top_k and min_p of "
            "rollout.gconfig: set trainer.proximal: trainer, or remove them"
        )
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
