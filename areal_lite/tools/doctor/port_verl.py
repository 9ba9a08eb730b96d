"""verl's keys (1dda039, ``verl/trainer/config/``) with their defaults, and the keys that say the same here."""

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

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_C = "algorithm.rollout_correction."


def _bounds(value: Any, get: Get) -> Any:
    """Return one bound per statistic; verl's single number of a k1 statistic has its inverse as the lower bound."""
    names = str(get(_C + "rollout_rs") or "").split(",")
    bounds = [part.strip() for part in str(value).split(",")]
    if value is None or names == [""]:
        return UNUSED
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    pairs = zip(names, bounds, strict=False)
    return ",".join(
        f"{1 / number(bound):g}_{bound}" if name.endswith("k1") and number(bound) and "_" not in bound else bound
        for name, bound in pairs
    )


def _advantage(value: Any, get: Get) -> Any:
    if value == "grpo" and number(get(_R + "n")) == 1:
        return "reinforce"
    return "dr_grpo" if value == "grpo" and not get("algorithm.norm_adv_by_std_in_grpo") else value


def _gae(get: Get) -> bool:
    return bool(get("algorithm.adv_estimator") == "gae")


def _kl_loss(get: Get) -> bool:
    return bool(get(_A + "use_kl_loss"))


def _kl_reward(get: Get) -> bool:
    return bool(get("algorithm.use_kl_in_reward")) and not _kl_loss(get)


_ONE = "a group of one: verl's GRPO trains its reward as it is, grpo here gives 0"
VERL = (
    Rule("actor_rollout_ref.model.path", UNUSED, "model_path"),
    Rule("data.train_files", UNUSED, "train_dataset.path"),
    Rule("data.val_files", UNUSED, "eval_dataset.path"),
    Rule("data.train_max_samples", -1, "train_dataset.max_samples", limit),
    Rule("data.val_max_samples", UNUSED, "eval_dataset.max_samples", limit),
    Rule("data.shuffle", True, "train_dataset.shuffle"),
    Rule("data.seed", None, "seed", given),
    Rule("data.prompt_key", "prompt", "train_dataset.prompt_key"),
    Rule("data.max_prompt_length", 512, "train_dataset.max_prompt_length", why="its default truncation is an error"),
    Rule("data.filter_overlong_prompts", False, "train_dataset.filter_overlong_prompts"),
    Rule("data.filter_overlong_prompts_workers", 1, "train_dataset.filter_overlong_prompts_workers"),
    Rule("data.truncation", "error", "train_dataset.truncation"),
    Rule("data.return_raw_chat", True, "train_dataset.return_raw_chat", why="agents get their row's messages anyway"),
    Rule("data.return_full_prompt", False, "train_dataset.return_full_prompt"),
    Rule("data.need_tools_kwargs", False, "train_dataset.need_tools_kwargs"),
    Rule("data.apply_chat_template_kwargs", {}, "train_dataset.apply_chat_template_kwargs"),
    Rule("data.custom_cls.path", None, "train_dataset.custom_cls.path", given),
    Rule("data.custom_cls.name", None, "train_dataset.custom_cls.name", given),
    Rule("data.sampler.class_path", None, "train_dataset.sampler.path", given),
    Rule("data.sampler.class_name", None, "train_dataset.sampler.name", given),
    Rule("data.datagen.path", None, "train_dataset.datagen.path", given),
    Rule("data.datagen.name", None, "train_dataset.datagen.name", given),
    Rule("data.train_batch_size", 1024, "rollout.consumer_batch_size"),
    Rule("data.gen_batch_size", None, "rollout.gen_batch_size"),
    Rule("data.max_response_length", 512, "rollout.gconfig.max_new_tokens"),
    Rule(_R + "name", UNUSED, "server.backend"),
    Rule(_R + "n", 1, "rollout.group_size"),
    Rule(_R + "temperature", 1.0, "rollout.gconfig.temperature"),
    Rule(_R + "top_p", 1.0, "rollout.gconfig.top_p"),
    Rule(_R + "top_k", -1, "rollout.gconfig.top_k", limit),
    Rule(_R + "ignore_eos", False, "rollout.gconfig.ignore_eos"),
    Rule(_R + "val_kwargs.do_sample", False, "rollout.eval_gconfig.greedy", lambda value, get: not value),
    Rule(_R + "val_kwargs.n", 1, "evaluation.group_size"),
    Rule(_R + "n", 1, "trainer.advantage",
         when(lambda get: get("algorithm.adv_estimator") == "grpo" and number(get(_R + "n")) == 1,
             lambda value, get: "reinforce"), _ONE),
    Rule("algorithm.adv_estimator", "gae", "trainer.advantage", _advantage),
    Rule("algorithm.gamma", 1.0, "trainer.advantage_kwargs.gamma", when(_gae)),
    Rule("algorithm.lam", 1.0, "trainer.advantage_kwargs.lam", when(_gae)),
    Rule("algorithm.norm_adv_by_std_in_grpo", True, "trainer.advantage",
         when(lambda get: get("algorithm.adv_estimator") == "grpo",
             lambda value, get: _advantage("grpo", get))),
    Rule(_A + "ppo_mini_batch_size", 256, "trainer.minibatches_per_step",
         lambda value, get: minibatches(value, get("data.train_batch_size"))),
    Rule(_A + "ppo_max_token_len_per_gpu", 16384, "trainer.max_tokens_per_microbatch"),
    Rule(_A + "policy_loss.loss_mode", "vanilla", "trainer.loss", named({"vanilla": "ppo", "geo_mean": "gmpo"})),
    Rule(_A + "clip_ratio", 0.2, LOSS + "clip_eps",
         when(lambda get: get(_A + "clip_ratio_low") is None), "clip_ratio_low and clip_ratio_high decide over it"),
    Rule(_A + "clip_ratio_low", 0.2, LOSS + "clip_eps", given),
    Rule(_A + "clip_ratio_high", 0.2, LOSS + "clip_eps_high",
         lambda value, get: None if value == get(_A + "clip_ratio_low") else value),
    Rule(_A + "clip_ratio_c", 3.0, LOSS + "dual_clip"),
    Rule(_A + "loss_agg_mode", "token-mean", "trainer.loss_aggregation"),
    Rule(_A + "loss_scale_factor", None, "trainer.loss_scale"),
    Rule(_A + "entropy_coeff", 0, "trainer.entropy_coef"),
    Rule(_A + "use_kl_loss", False, "trainer.kl.place", lambda value, get: "loss" if value else UNUSED),
    Rule(_A + "kl_loss_coef", 0.001, "trainer.kl.coef", when(_kl_loss)),
    Rule(_A + "kl_loss_type", "low_var_kl", "trainer.kl.estimator", when(_kl_loss, named(KL))),
    Rule("algorithm.use_kl_in_reward", False, "trainer.kl.place", when(_kl_reward, lambda value, get: "reward")),
    Rule("algorithm.kl_ctrl.kl_coef", 0.001, "trainer.kl.coef", when(_kl_reward)),
    Rule("algorithm.kl_penalty", "kl", "trainer.kl.estimator", when(_kl_reward, named(KL))),
    Rule(_C + "rollout_is", None, "trainer.correction.level", lambda value, get: value or "none"),
    Rule(_C + "rollout_is_threshold", 2.0, "trainer.correction.max_weight", when(lambda get: get(_C + "rollout_is"))),
    Rule(_C + "rollout_is_batch_normalize", False, "trainer.correction.normalize"),
    Rule(_C + "rollout_rs", None, "trainer.correction.reject"),
    Rule(_C + "rollout_rs_threshold", None, "trainer.correction.reject_bounds", _bounds,
         "bounds of a k1 statistic are lower_upper; of a single number u verl makes 1/u_u"),
    Rule(_C + "bypass_mode", False, "trainer.proximal", lambda value, get: "behaviour" if value else "trainer"),
    Rule(_A + "optim.lr", 1e-6, "trainer.learning_rate"),
    Rule(_A + "optim.weight_decay", 0.01, "trainer.weight_decay"),
    Rule(_A + "optim.betas", [0.9, 0.999], "trainer.adam_betas"),
    Rule(_A + "optim.lr_warmup_steps", -1, "trainer.warmup_steps", lambda value, get: max(0, int(number(value)))),
    Rule(_A + "optim.lr_scheduler_type", "constant", "trainer.lr_schedule"),
    Rule(_A + "grad_clip", 1.0, "trainer.max_grad_norm"),
    Rule("critic.optim.lr", 1e-5, "trainer.critic.learning_rate", when(_gae)),
    Rule("critic.optim.weight_decay", 0.01, "trainer.critic.weight_decay", when(_gae)),
    Rule("critic.cliprange_value", 0.5, "trainer.critic.clip_eps", when(_gae)),
    Rule("trainer.critic_warmup", 0, "trainer.critic.updates_before_policy",
         when(_gae, lambda value, get: max(0, int(number(value)) - 1))),
    Rule("trainer.total_epochs", 30, "trainer.total_epochs"),
    Rule("trainer.total_training_steps", None, "trainer.total_steps", given),
    Rule("trainer.experiment_name", UNUSED, "trial_name"),
    Rule("trainer.project_name", UNUSED, "experiment_name"),
    Rule("trainer.save_freq", -1, "checkpoint.every_steps", limit),
    Rule("trainer.save_freq", -1, "checkpoint.every_minutes", lambda value, get: None, "verl saves by steps alone"),
    Rule("trainer.max_actor_ckpt_to_keep", None, "checkpoint.keep", given),
    Rule("trainer.resume_mode", "auto", "checkpoint.resume",
         lambda value, get: get("trainer.resume_from_path") if value == "resume_path" else
         {"disable": "never"}.get(value, value)),
    Rule("trainer.resume_from_path", None, "checkpoint.resume",
         when(lambda get: get("trainer.resume_mode") == "resume_path")),
    Rule("trainer.test_freq", -1, "evaluation.every_steps", limit),
    Rule("trainer.val_before_train", True, "evaluation.at_start"),
    Rule("trainer.rollout_data_dir", None, "dump_scores", lambda value, get: value is not None),
)  # fmt: skip
