"""slime's arguments (624b824, ``slime/utils/arguments.py``; Megatron's for the optimizer) with their defaults, and the
keys that say the same here."""

from __future__ import annotations

from typing import Any

from areal_lite.tools.doctor.port_rules import (
    KL,
    LOSS,
    UNUSED,
    Get,
    Rule,
    given,
    limit,
    minibatches,
    named,
    number,
    when,
)


def _advantage(value: Any, get: Get) -> Any:
    name = {"gspo": "grpo", "cispo": "grpo", "ppo": "gae"}.get(get("advantage_estimator"), get("advantage_estimator"))
    return "dr_grpo" if name == "grpo" and get("disable_grpo_std_normalization") else name


def _minibatches(value: Any, get: Get) -> Any:
    if steps := get("num_steps_per_rollout"):
        return steps
    episodes = number(get("rollout_batch_size")) * number(get("n_samples_per_prompt"))
    return minibatches(get("global_batch_size"), episodes)


def _ppo(get: Get) -> bool:
    return bool(get("advantage_estimator") == "ppo")


def _empty(value: Any, get: Get) -> Any:
    return "areal_lite.data.source.row_streams.empty_rows" if value else UNUSED


SLIME = (
    Rule("hf_checkpoint", UNUSED, "model_path"),
    Rule("prompt_data", UNUSED, "train_dataset.path"),
    Rule("disable_rollout_global_dataset", False, "rollout_global_dataset", lambda value, get: not value),
    Rule("disable_rollout_global_dataset", False, "train_dataset.path", _empty, "empty samples"),
    Rule("input_key", "input", "train_dataset.prompt_key"),
    Rule("label_key", None, "train_dataset.label_key"),
    Rule("metadata_key", "metadata", "train_dataset.metadata_key", why="only if the rows have this column"),
    Rule("tool_key", "tools", "train_dataset.tools_key"),
    Rule("apply_chat_template", False, "train_dataset.apply_chat_template", why="an agent's messages need it"),
    Rule("rollout_shuffle", False, "train_dataset.shuffle"),
    Rule("rollout_seed", 42, "seed"),
    Rule("rollout_max_prompt_len", None, "train_dataset.max_prompt_length"),
    Rule("rollout_max_prompt_len", None, "train_dataset.filter_overlong_prompts",
         lambda value, get: value is not None, "slime drops longer prompts"),
    Rule("rollout_max_response_len", UNUSED, "rollout.gconfig.max_new_tokens"),
    Rule("rollout_temperature", 1.0, "rollout.gconfig.temperature"),
    Rule("rollout_top_p", 1.0, "rollout.gconfig.top_p"),
    Rule("rollout_top_k", -1, "rollout.gconfig.top_k", limit),
    Rule("rollout_stop", None, "rollout.gconfig.stop", lambda value, get: [value] if isinstance(value, str) else value),
    Rule("rollout_stop_token_ids", None, "rollout.gconfig.stop_token_ids",
         lambda value, get: [value] if isinstance(value, int) else value),
    Rule("rollout_skip_special_tokens", False, "rollout.gconfig.skip_special_tokens"),
    Rule("rollout_batch_size", UNUSED, "rollout.consumer_batch_size"),
    Rule("n_samples_per_prompt", 1, "rollout.group_size"),
    Rule("over_sampling_batch_size", None, "rollout.gen_batch_size"),
    Rule("mask_offpolicy_in_partial_rollout", False, "rollout.mask_offpolicy_in_partial_rollout"),
    Rule("buffer_filter_path", None, "buffer_filter"),
    Rule("reward_key", None, "rollout.rewards.key"),
    Rule("num_rollout", UNUSED, "trainer.total_steps"),
    Rule("num_epoch", UNUSED, "trainer.total_epochs"),
    Rule("global_batch_size", None, "trainer.minibatches_per_step", _minibatches),
    Rule("num_steps_per_rollout", None, "trainer.minibatches_per_step", _minibatches),
    Rule("max_tokens_per_gpu", None, "trainer.max_tokens_per_microbatch", given),
    Rule("advantage_estimator", "grpo", "trainer.advantage", _advantage),
    Rule("advantage_estimator", "grpo", "trainer.loss",
         lambda value, get: value if value in ("gspo", "cispo") else "ppo"),
    Rule("disable_grpo_std_normalization", False, "trainer.advantage", _advantage),
    Rule("normalize_advantages", False, "trainer.advantage_std", lambda value, get: "batch" if value else "none"),
    Rule("normalize_advantages", False, "trainer.advantage_mean", lambda value, get: "batch" if value else "none"),
    Rule("gamma", 1.0, "trainer.advantage_kwargs.gamma", when(_ppo)),
    Rule("lambd", 1.0, "trainer.advantage_kwargs.lam", when(_ppo)),
    Rule("value_clip", 0.2, "trainer.critic.clip_eps", when(_ppo)),
    Rule("eps_clip", 0.2, LOSS + "clip_eps"),
    Rule("eps_clip_high", None, LOSS + "clip_eps_high"),
    Rule("eps_clip_c", None, LOSS + "dual_clip"),
    Rule("calculate_per_token_loss", False, "trainer.loss_aggregation",
         lambda value, get: "token-mean" if value else "seq-mean-token-mean"),
    Rule("entropy_coef", 0.0, "trainer.entropy_coef"),
    Rule("use_kl_loss", False, "trainer.kl.place",
         when(lambda get: number(get("kl_loss_coef")), lambda value, get: "loss" if value else UNUSED)),
    Rule("kl_loss_coef", 0.0, "trainer.kl.coef", when(lambda get: get("use_kl_loss") and number(get("kl_loss_coef")))),
    Rule("kl_coef", 0.0, "trainer.kl.coef", when(lambda get: number(get("kl_coef")))),
    Rule("kl_coef", 0.0, "trainer.kl.place", when(lambda get: number(get("kl_coef")), lambda value, get: "reward")),
    Rule("kl_loss_type", "k1", "trainer.kl.estimator",
         when(lambda get: number(get("kl_coef")) or (get("use_kl_loss") and number(get("kl_loss_coef"))),
             named(KL))),
    Rule("use_tis", False, "trainer.correction.level", lambda value, get: "token" if value else "none"),
    Rule("tis_clip", 2.0, "trainer.correction.max_weight", when(lambda get: get("use_tis"))),
    Rule("use_rollout_logprobs", False, "trainer.proximal", lambda value, get: "behaviour" if value else "trainer"),
    Rule("lr", 1e-6, "trainer.learning_rate"),
    Rule("lr_decay_style", "linear", "trainer.lr_schedule", why="Megatron's default"),
    Rule("lr_warmup_iters", 0, "trainer.warmup_steps"),
    Rule("weight_decay", 0.01, "trainer.weight_decay", why="Megatron's default"),
    Rule("adam_beta1", 0.9, "trainer.adam_betas", lambda value, get: [value, get("adam_beta2")]),
    Rule("adam_beta2", 0.999, "trainer.adam_betas", lambda value, get: [get("adam_beta1"), value]),
    Rule("adam_eps", 1e-8, "trainer.adam_eps"),
    Rule("clip_grad", 1.0, "trainer.max_grad_norm"),
    Rule("eval_prompt_data", UNUSED, "eval_dataset.path",
         lambda value, get: value[-1] if isinstance(value, list) and value else value),
    Rule("eval_interval", None, "evaluation.every_steps"),
    Rule("n_samples_per_eval_prompt", 1, "evaluation.group_size"),
    Rule("skip_eval_before_train", False, "evaluation.at_start", lambda value, get: not value),
    Rule("save_interval", None, "checkpoint.every_steps"),
    Rule("save_interval", None, "checkpoint.every_minutes", lambda value, get: None, "slime saves by steps alone"),
)  # fmt: skip
