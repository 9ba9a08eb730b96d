"""AReaL's keys (4aef98d, ``areal/api/cli_args.py``) with their defaults, and the keys that say the same here."""

from __future__ import annotations

from typing import Any

from areal_lite.tools.doctor.port_rules import LOSS, UNUSED, Get, Rule, given, named, number, when


def _advantage(value: Any, get: Get) -> Any:
    if get("critic.path") is not None:
        return "gae"
    mean, std = get("actor.reward_norm.mean_level"), get("actor.reward_norm.std_level")
    if mean == "group" and std in ("group", None):
        return "grpo" if std else "dr_grpo"
    return "reinforce" if mean is None and std is None else UNUSED


def _proximal(value: Any, get: Get) -> str:
    return "trainer" if get("actor.use_decoupled_loss") or get("actor.recompute_logprob") else "behaviour"


def _kl(get: Get) -> bool:
    return get("ref.path") is not None and number(get("actor.kl_ctl")) > 0


def _level(value: Any, get: Get) -> Any:
    return value or "none"


def _resume(value: Any, get: Get) -> Any:
    return "auto" if value in ("on", "auto", True) else "never"  # on and off are booleans in YAML 1.1


def _lora(get: Get) -> bool:
    return bool(get("actor.use_lora"))


def _rejects(get: Get) -> bool:
    return get("actor.rejection_sampling.upper") is not None


_OPT, _G = "actor.optimizer.", "rollout.gconfig."
AREAL = (
    Rule("experiment_name", UNUSED, "experiment_name"),
    Rule("trial_name", UNUSED, "trial_name"),
    Rule("seed", 1, "seed"),
    Rule("cluster.fileroot", "/tmp/areal/", "fileroot"),  # nosec B108 # AReaL's default, only compared
    Rule("tokenizer_path", UNUSED, "rollout.tokenizer_path"),
    Rule("total_train_epochs", 1, "trainer.total_epochs"),
    Rule("total_train_steps", None, "trainer.total_steps", given),
    Rule("train_dataset.path", UNUSED, "train_dataset.path"),
    Rule("train_dataset.shuffle", True, "train_dataset.shuffle"),
    Rule("train_dataset.max_length", None, "train_dataset.max_prompt_length"),
    Rule("train_dataset.max_length", None, "train_dataset.filter_overlong_prompts",
         lambda value, get: value is not None, "AReaL's datasets drop longer prompts"),
    Rule("train_dataset.batch_size", 1, "rollout.consumer_batch_size"),
    Rule("valid_dataset.path", UNUSED, "eval_dataset.path"),
    Rule("rollout.consumer_batch_size", UNUSED, "rollout.consumer_batch_size"),
    Rule("rollout.max_concurrent_rollouts", None, "rollout.max_concurrent_rollouts"),
    Rule("rollout.max_head_offpolicyness", 0, "rollout.max_head_offpolicyness"),
    Rule("rollout.dump_to_file", False, "rollout.dump_to_file"),
    Rule("rollout.request_retries", 3, "rollout.request_retries"),
    Rule("rollout.request_timeout", 3600, "rollout.faults.request_timeout_s"),
    Rule("gconfig.n_samples", 1, "rollout.group_size"),
    Rule("gconfig.n_samples", 1, "trainer.advantage", _advantage),
    *(
        Rule(f"gconfig.{name}", default, _G + name)
        for name, default in {
            "max_new_tokens": 16384, "min_new_tokens": 0, "max_tokens": 32768, "greedy": False, "temperature": 1.0,
            "top_p": 1.0, "stop": None, "ignore_eos": False, "skip_special_tokens": True, "frequency_penalty": 0.0,
        }.items()
    ),
    Rule("gconfig.top_k", 10**8, _G + "top_k", lambda value, get: None if number(value) >= 10**8 else value),
    Rule("gconfig.stop_token_ids", [], _G + "stop_token_ids", lambda value, get: value or None),
    Rule("actor.path", UNUSED, "model_path"),
    Rule("actor.dtype", "bfloat16", "trainer.dtype", why="auto is bfloat16 where the device computes it"),
    Rule("actor.gradient_checkpointing", False, "trainer.gradient_checkpointing"),
    Rule("actor.mb_spec.max_tokens_per_mb", None, "trainer.max_tokens_per_microbatch", given),
    Rule("actor.use_lora", False, "trainer.lora.rank",
         lambda value, get: get("actor.lora_rank") if value else UNUSED),
    Rule("actor.lora_rank", 32, "trainer.lora.rank", when(_lora)),
    Rule("actor.lora_alpha", 16, "trainer.lora.alpha", when(_lora)),
    Rule("actor.ppo_n_minibatches", 4, "trainer.minibatches_per_step"),
    Rule("actor.eps_clip", 0.2, LOSS + "clip_eps"),
    Rule("actor.eps_clip_higher", None, LOSS + "clip_eps_high"),
    Rule("actor.c_clip", None, LOSS + "dual_clip"),
    Rule("actor.use_sapo_loss", False, "trainer.loss", lambda value, get: "sapo" if value else "ppo"),
    Rule("actor.reward_norm.mean_level", None, "trainer.advantage", _advantage, "no reward_norm, no baseline"),
    Rule("actor.reward_norm.std_level", None, "trainer.advantage", _advantage),
    Rule("actor.adv_norm.mean_level", None, "trainer.advantage_mean", _level),
    Rule("actor.adv_norm.std_level", None, "trainer.advantage_std", _level),
    Rule("actor.discount", 1.0, "trainer.advantage_kwargs.gamma",
         when(lambda get: _advantage(None, get) in ("gae", "reinforce"))),
    Rule("actor.gae_lambda", 1.0, "trainer.advantage_kwargs.lam",
         when(lambda get: _advantage(None, get) == "gae")),
    Rule("actor.kl_ctl", 0.1, "trainer.kl.coef", when(_kl)),
    Rule("actor.kl_ctl", 0.1, "trainer.kl.place", when(_kl, lambda value, get: "reward")),
    Rule("actor.kl_estimator", "k1", "trainer.kl.estimator", when(_kl)),
    Rule("ref.path", None, "trainer.kl.coef", when(_kl, lambda value, get: get("actor.kl_ctl"))),
    Rule("actor.use_decoupled_loss", False, "trainer.proximal", _proximal, "the center of the trust region"),
    Rule("actor.use_decoupled_loss", False, "trainer.correction.level",
         when(lambda get: _proximal(None, get) == "trainer", lambda value, get: "token" if value else "none")),
    Rule("actor.recompute_logprob", False, "trainer.proximal", _proximal),
    Rule("actor.rejection_sampling.upper", None, "trainer.correction.max_weight", given),
    Rule("actor.rejection_sampling.action", "mask", "trainer.correction.outside",
         when(_rejects, named({"clamp": "truncate"}))),
    Rule(_OPT + "lr", 1e-3, "trainer.learning_rate"),
    Rule(_OPT + "weight_decay", 0.01, "trainer.weight_decay"),
    Rule(_OPT + "beta1", 0.9, "trainer.adam_betas", lambda value, get: [value, get(_OPT + "beta2")]),
    Rule(_OPT + "beta2", 0.999, "trainer.adam_betas", lambda value, get: [get(_OPT + "beta1"), value]),
    Rule(_OPT + "eps", 1e-8, "trainer.adam_eps"),
    Rule(_OPT + "lr_scheduler_type", "constant", "trainer.lr_schedule"),
    Rule(_OPT + "gradient_clipping", 1.0, "trainer.max_grad_norm"),
    Rule("critic.path", None, "trainer.critic.model_path", given),
    Rule("critic.eps_clip", 0.5, "trainer.critic.clip_eps", when(lambda get: get("critic.path") is not None)),
    Rule("saver.freq_steps", None, "checkpoint.every_steps", why="AReaL's saver writes models, its recover resumes"),
    Rule("recover.mode", "disabled", "checkpoint.resume", _resume),
    Rule("evaluator.freq_steps", None, "evaluation.every_steps"),
    Rule("evaluator.eval_before_train", False, "evaluation.at_start"),
)  # fmt: skip
