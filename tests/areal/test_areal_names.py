"""A workflow file written for AReaL runs after `areal` became `areal_lite` in its imports."""

from __future__ import annotations
import dataclasses
import importlib
import uuid
from types import SimpleNamespace
from typing import Any
import pytest
import torch
from areal_lite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal_lite import workflow_context
from areal_lite.agents import ArealOpenAI
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.io_struct import ModelRequest
from areal_lite.api.reward_api import AsyncRewardWrapper
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.config.dotted_path import load_object
from areal_lite.errors import ConfigError
from areal_lite.rollout.remote_inf_engine import GroupedRolloutWorkflow, RemoteInfEngine
from tests.agents.scripted_engine import tokenizer
from tests.stub_server import StubServer, StubThread


def reward_fn(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Reward by the number of tokens."""
    return float(len(completion_ids) == data["length"])


class Tokenizer:
    """As much of a tokenizer as the workflow uses."""

    eos_token_id, pad_token_id = 2, 0

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> list[int]:
        """Return the bytes of the messages."""
        return [b + 3 for m in messages for b in m["content"].encode()]

    def decode(self, ids: list[int]) -> str:
        """Return the ids as text."""
        return " ".join(map(str, ids))


class RLVRWorkflow(RolloutWorkflow):
    """The shape of AReaL's single-turn workflow."""

    def __init__(self, reward_fn: Any, gconfig: GenerationHyperparameters, tokenizer: Any) -> None:
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self.tokenizer = tokenizer
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Ask once."""
        input_ids = self.tokenizer.apply_chat_template(data["messages"], tokenize=True, add_generation_prompt=True)
        req = ModelRequest(rid=uuid.uuid4().hex, input_ids=input_ids, gconfig=self.gconfig, tokenizer=self.tokenizer)
        resp = await engine.agenerate(req)
        assert workflow_context.stat_scope() == "rollout"
        assert workflow_context.get().task_id is not None
        reward = await self.async_reward_fn(
            self.tokenizer.decode(input_ids),
            self.tokenizer.decode(resp.output_tokens),
            resp.input_tokens,
            resp.output_tokens,
            **data,
        )
        res = {
            "input_ids": torch.tensor(resp.input_tokens + resp.output_tokens, dtype=torch.int32),
            "loss_mask": torch.tensor([0] * resp.input_len + [1] * resp.output_len, dtype=torch.int32),
            "logprobs": torch.tensor([0.0] * resp.input_len + resp.output_logprobs, dtype=torch.float32),
            "versions": torch.tensor([-1] * resp.input_len + resp.output_versions, dtype=torch.int32),
            "attention_mask": torch.ones(resp.input_len + resp.output_len, dtype=torch.bool),
            "rewards": torch.tensor(reward, dtype=torch.float32),
        }
        return {k: v.unsqueeze(0) for k, v in res.items()}


AREAL_IMPORTS = [
    "api.alloc_mode", "engine", "engine.sglang_remote", "engine.vllm_remote", "experimental.agent_service.worker",
    "experimental.camel.openai_model", "experimental.workflow.multi_turn_v2",
    "infra.async_task_runner", "infra.controller.rollout_controller", "infra.launcher.local", "infra.platforms",
    "infra.rpc.rtensor", "infra.sandbox", "infra.scheduler.local", "infra.scheduler.slurm",
    "infra.staleness_manager", "dataset.gsm8k", "reward.geometry3k", "trainer.rl_trainer", "trainer.sft_trainer",
    "trainer.dpo_trainer", "trainer.rw_trainer", "trainer.ppo.actor", "utils.dataloader", "utils.environ",
    "utils.network", "utils.printing", "utils.proc", "utils.saver", "utils.seeding",
    "utils.stats_logger", "workflow.rlvr", "workflow.langchain.math_agent", "workflow.openai.math_agent",
]  # fmt: skip
"""Modules that AReaL's examples and documentation import and that areal_lite does not have, and a few more."""


@pytest.mark.parametrize("module", AREAL_IMPORTS)
def test_an_import_of_a_module_that_only_areal_has_says_what_replaces_it(module: str) -> None:
    with pytest.raises(ImportError, match=rf"there is no module areal_lite\.{module.split('.')[0]}\S*: [`\w].{{15}}"):
        importlib.import_module(f"areal_lite.{module}")
    with pytest.raises(ConfigError, match=f"workflow is 'areal_lite.{module}.Name': there is no module areal_lite"):
        load_object(f"areal_lite.{module}.Name", where="workflow")


def test_what_areals_workflows_set_and_read_is_there() -> None:
    from areal_lite.experimental.agent_service.types import AgentRequest, AgentResponse, EventEmitter  # noqa: F401

    gconfig: Any = GenerationHyperparameters(max_new_tokens=8)
    gconfig.n_samples = 1
    assert gconfig == GenerationHyperparameters(max_new_tokens=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        gconfig.max_new_tokens = 9
    faults: Any = {"request_timeout_s": 7}
    engine: Any = SimpleNamespace(config=InferenceEngineConfig(faults=faults))
    client = ArealOpenAI(engine, tokenizer())
    assert client.engine.config.request_timeout == 7
    request = AgentRequest(message="hello", session_key="s", run_id="r")
    assert AgentResponse(summary=request.message, metadata={}).summary == "hello"


def test_the_replacement_is_named_in_every_form_of_import() -> None:
    with pytest.raises(ImportError, match="areal_lite.utils.seeding: set seed"):
        from areal_lite.utils import seeding  # noqa: F401
    with pytest.raises(ImportError, match="areal_lite.infra.scheduler: `areal-lite train run.yaml` starts"):
        from areal_lite.infra.scheduler.local import LocalScheduler  # noqa: F401
    with pytest.raises(ImportError, match="areal_lite has no PPOTrainer: `areal-lite train run.yaml` trains"):
        from areal_lite import PPOTrainer  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="No module named 'areal_lite.api.nothing'"):
        importlib.import_module("areal_lite.api.nothing")  # not AReaL's either


def test_an_areal_workflow_runs_with_its_imports_renamed() -> None:
    with StubThread(StubServer(answer_len=5)) as stub:
        config = InferenceEngineConfig(backend="sglang", addresses=[stub.address])
        with RemoteInfEngine(config) as engine:
            rows = [{"messages": [{"role": "user", "content": "hi"}], "length": n} for n in (5, 6)]
            results = engine.rollout_batch(
                rows,
                workflow=RLVRWorkflow,
                workflow_kwargs={
                    "reward_fn": reward_fn,
                    "gconfig": GenerationHyperparameters(max_new_tokens=8),
                    "tokenizer": Tokenizer(),
                },
                group_size=2,
            )
    assert [r.rewards for r in results] == [[1.0, 1.0], [0.0, 0.0]], [r.error for r in results]
    assert ArealOpenAI is not None and GroupedRolloutWorkflow is not None
