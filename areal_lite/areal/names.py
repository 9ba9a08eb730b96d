"""AReaL's public names and modules that areal_lite does not have, and what replaces each."""

from __future__ import annotations

_TRAIN = "`areal-lite train run.yaml` trains; from Python, areal_lite.Trainer(config).train(workflow=...)"
_YAML = "write these settings in the run's YAML; `areal-lite train --help all` lists every key"
_SERVERS = "set server.backend, server.replicas and server.args, or name running servers in rollout.addresses"
_ENGINE = "use areal_lite.rollout.remote_inf_engine.RemoteInfEngine"
_LAUNCH = "`areal-lite train run.yaml` starts all processes; `torchrun -m areal_lite train` uses several GPUs"

REPLACEMENTS = {
    "PPOTrainer": _TRAIN,
    "SFTTrainer": "`areal-lite sft run.yaml` fine-tunes",
    "DPOTrainer": "`areal-lite dpo run.yaml` trains on preference pairs",
    "RWTrainer": "`areal-lite reward-model run.yaml` trains a reward model",
    **dict.fromkeys(("RolloutController", "WorkflowExecutor", "RemoteSGLangEngine", "RemotevLLMEngine"), _ENGINE),
    "TrainController": _TRAIN,
    "TrainEngine": _TRAIN,
    "StalenessManager": "set rollout.max_head_offpolicyness in the run's YAML",
    "current_platform": "set trainer.device and server.device in the run's YAML",
    "load_expr_config": "use areal_lite.config.loader.load_config, or run `areal-lite train run.yaml key=value`",
    **dict.fromkeys(("BaseExperimentConfig", "GRPOConfig", "PPOConfig", "TrainDatasetConfig", "MicroBatchSpec"), _YAML),
    "SFTConfig": "use areal_lite.config.supervised_config.SFTConfig",
    "DPOConfig": "use areal_lite.config.supervised_config.DPOConfig",
    "RWConfig": "use areal_lite.config.supervised_config.RewardModelConfig",
    **dict.fromkeys(("SGLangConfig", "vLLMConfig", "ModelAllocation", "AllocationMode", "AllocationType"), _SERVERS),
    **dict.fromkeys(("LocalScheduler", "RayScheduler", "SlurmScheduler", "Scheduler", "SchedulingSpec"), _LAUNCH),
    **dict.fromkeys(("LocalLauncher", "RayLauncher", "SlurmLauncher"), _LAUNCH),
    "AgentWorkflow": "no base class is needed: any class with `async def run(self, data, **extra_kwargs)` is an agent",
    "WeightUpdateMeta": "call RemoteInfEngine.update_weights_from_disk(path, version)",
    "get_custom_dataset": "name the rows as train_dataset.path in the run's YAML: files, a hub dataset or a function",
    "get_custom_reward_fn": "give AsyncRewardWrapper the function, or its dotted path",
    "OpenAIProxyWorkflow": "name the agent as `workflow` in the run's YAML",
    "OpenAIProxyClient": "name the agent as `workflow` in the run's YAML",
    **dict.fromkeys(("stat", "denominator"), "record numbers with stats_tracker.get(scope).scalar(name=value)"),
    **dict.fromkeys(("export", "export_all"), "call RemoteInfEngine.take_scalars()"),
}  # fmt: skip

_LISTED = "docs/areal.md lists the names that exist here"
MODULES = {
    "workflow": "copy AReaL's file, rename `areal` to `areal_lite` in its imports, and name its class as `workflow`",
    "experimental.workflow": "copy AReaL's file and rename `areal` to `areal_lite` in its imports",
    "experimental": _LISTED,
    **dict.fromkeys(("api.alloc_mode", "infra.platforms"), _SERVERS),
    **dict.fromkeys(("api.scheduler_api", "infra.scheduler", "infra.launcher", "infra.rpc"), _LAUNCH),
    **dict.fromkeys(("engine", "infra.async_task_runner", "infra.dist_rollout", "infra.controller"), _ENGINE),
    "infra.staleness_manager": REPLACEMENTS["StalenessManager"],
    "infra.sandbox": "an agent starts programs with workflow_context.get().agent.run_process (docs/agents.md)",
    **dict.fromkeys(("trainer.rl_trainer", "trainer.ppo"), _TRAIN),
    **dict.fromkeys(("trainer.sft_trainer", "trainer.sft"), REPLACEMENTS["SFTTrainer"]),
    **dict.fromkeys(("trainer.dpo_trainer", "trainer.dpo"), REPLACEMENTS["DPOTrainer"]),
    **dict.fromkeys(("trainer.rw_trainer", "trainer.rw"), REPLACEMENTS["RWTrainer"]),
    "dataset": REPLACEMENTS["get_custom_dataset"],
    "reward": "write the reward function in your project; " + _LISTED,
    "utils.seeding": "set seed in the run's YAML",
    "utils": _LISTED,
}
"""AReaL's modules, without ``areal.``; each stands for all below it."""


def check_module(module: str) -> None:
    """Raise an ImportError with the replacement if ``module`` is one of AReaL's that areal_lite does not have."""
    parts = module.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if hint := MODULES.get(".".join(parts[:end])):
            raise ImportError(f"there is no module {module}: {hint}", name=module)


def missing_name(module: str, name: str) -> Exception:
    """Return the error for a name that ``module`` does not have, with its replacement if AReaL has the name."""
    if name in REPLACEMENTS:  # an ImportError, because ``from module import name`` hides the text of an AttributeError
        return ImportError(f"{module} has no {name}: {REPLACEMENTS[name]}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}")
