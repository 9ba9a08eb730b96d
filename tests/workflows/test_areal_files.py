"""Files written for AReaL run after `areal` became `areal_lite` in their imports; missing names name a replacement."""

from __future__ import annotations
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
import pytest
from areal_lite.api import GenerationHyperparameters, Group, InferenceEngineConfig
from areal_lite.areal.names import table
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.agents.scripted_engine import tokenizer
from tests.stub_server import StubServer, StubThread

REWARDS = """
def count_tokens(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    assert isinstance(prompt, str) and isinstance(completions, str)
    return float(len(completion_ids) == answer)

def says(completions: str, answer: int) -> float:
    return float(len(completions) < 0)
"""

SINGLE_TURN = """
import uuid
import torch
from areal import workflow_context
from areal.api import AsyncRewardWrapper, InferenceEngine, ModelRequest, ModelResponse, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters
from areal.utils import logging, stats_tracker
from areal.utils.dynamic_import import import_from_string
from areal.utils.hf_utils import apply_chat_template
from areal.utils.perf_tracer import atrace_session_phase, session_context, trace_session
from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("SingleTurn")

class SingleTurn(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig: GenerationHyperparameters, tokenizer: PreTrainedTokenizerFast | str):
        if isinstance(tokenizer, str):
            from areal.utils.hf_utils import load_hf_tokenizer
            tokenizer = load_hf_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.reward = AsyncRewardWrapper(import_from_string(reward_fn))

    @trace_session("reward")
    async def score(self, resp: ModelResponse, prompt, data):
        text = self.tokenizer.decode(resp.output_tokens)
        return await self.reward(prompt, text, resp.input_tokens, resp.output_tokens, **data)

    @session_context()
    async def sample(self, engine, req, prompt, data):
        async with atrace_session_phase("generate"):
            resp = await engine.agenerate(req)
        reward = await self.score(resp, prompt, data)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)
        return resp, reward

    async def arun_episode(self, engine: InferenceEngine, data):
        ids = apply_chat_template(self.tokenizer, data["messages"], tokenize=True, add_generation_prompt=True)
        assert all(isinstance(i, int) for i in ids)
        req = ModelRequest(rid=uuid.uuid4().hex, input_ids=ids, gconfig=self.gconfig, tokenizer=self.tokenizer)
        resp, reward = await self.sample(engine, req, self.tokenizer.decode(ids), data)
        logger.info("reward %s", reward)
        res = {
            "input_ids": torch.tensor(resp.input_tokens + resp.output_tokens, dtype=torch.int32),
            "loss_mask": torch.tensor([0] * resp.input_len + [1] * resp.output_len, dtype=torch.int32),
            "logprobs": torch.tensor([0.0] * resp.input_len + resp.output_logprobs),
            "versions": torch.tensor([-1] * resp.input_len + resp.output_versions, dtype=torch.int32),
            "attention_mask": torch.ones(resp.input_len + resp.output_len, dtype=torch.bool),
            "rewards": torch.tensor(reward, dtype=torch.float32),
        }
        return {k: v.unsqueeze(0) for k, v in res.items()}
"""

RETRY = """
import uuid
import torch
from areal import workflow_context
from areal.api import AsyncRewardWrapper, ModelRequest, RolloutWorkflow
from areal.utils import stats_tracker
from areal.utils.data import concat_padded_tensors
from areal.utils.hf_utils import apply_chat_template

class Retry(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig, tokenizer, max_turns: int, turn_discount: float):
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer, self.max_turns, self.turn_discount = tokenizer, max_turns, turn_discount
        self.reward = AsyncRewardWrapper(reward_fn)
        again = [{"role": "assistant", "content": "text"}]
        start = apply_chat_template(tokenizer, again, tokenize=True)
        again += [{"role": "user", "content": "Wrong. Try again."}]
        self.again = apply_chat_template(tokenizer, again, tokenize=True, add_generation_prompt=True)[len(start):]

    async def arun_episode(self, engine, data):
        ids = apply_chat_template(self.tokenizer, data["messages"], tokenize=True, add_generation_prompt=True)
        prompt, turns, parts = ids, 0, []
        reward = 0.0
        while reward == 0.0 and turns < self.max_turns:
            req = ModelRequest(rid=uuid.uuid4().hex, input_ids=ids, gconfig=self.gconfig.new(n_samples=1))
            resp = await engine.agenerate(req)
            text = self.tokenizer.decode(resp.output_tokens)
            reward = await self.reward("", text, resp.input_tokens, resp.output_tokens, **data)
            seq = resp.input_tokens + resp.output_tokens
            parts.append({
                "input_ids": torch.tensor([seq]), "attention_mask": torch.ones(1, len(seq), dtype=torch.bool),
                "loss_mask": torch.tensor([[0] * resp.input_len + [1] * resp.output_len]),
                "logprobs": torch.tensor([[0.0] * resp.input_len + resp.output_logprobs]),
                "versions": torch.tensor([[-1] * resp.input_len + resp.output_versions]),
                "rewards": torch.tensor([reward * self.turn_discount**turns]),
            })
            ids = seq + [self.tokenizer.eos_token_id] + self.again
            turns += 1
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward, num_turns=turns)
        return concat_padded_tensors(parts)
"""

CLIENT = """
from copy import deepcopy
from areal import workflow_context
from areal.api import AsyncRewardWrapper, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters
from areal.experimental.openai import ArealOpenAI
from areal.experimental.openai.types import InteractionWithTokenLogpReward
from areal.utils import logging, stats_tracker

class Client(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig: GenerationHyperparameters, tokenizer, max_turns: int, style: str):
        self.gconfig, self.tokenizer = gconfig.new_with_stop_and_pad_token_ids(tokenizer), tokenizer
        self.max_turns, self.style = max_turns, style
        self.reward = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine, data):
        client = ArealOpenAI(engine=engine, tokenizer=self.tokenizer, chat_template_type="concat")
        messages, turn, reward = deepcopy(data["messages"]), 0, 0
        while reward == 0 and turn < self.max_turns:
            made = await client.chat.completions.create(
                messages=messages, frequency_penalty=self.gconfig.frequency_penalty,
                max_completion_tokens=self.gconfig.max_new_tokens, stop=self.gconfig.stop, store=True,
                temperature=self.gconfig.temperature, top_p=self.gconfig.top_p,
            )
            interaction = client.get_interaction(made.id)
            assert isinstance(interaction, InteractionWithTokenLogpReward)
            resp = interaction.model_response
            reward = await self.reward(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
                made.choices[0].message.content, resp.input_tokens, resp.output_tokens, **data,
            )
            client.set_reward(made.id, reward)
            messages += [{"role": "assistant", "content": made.choices[0].message.content}]
            messages += [{"role": "user", "content": "Wrong. Try again."}]
            turn += 1
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward, num_turns=turn)
        client.apply_reward_discount(turn_discount=0.5)
        return client.export_interactions(style=self.style)
"""

AGENT = """
import os
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from areal.api import AsyncRewardWrapper
from rewards import says

class MathAgent:
    def __init__(self, max_turns: int = 1, **kwargs):
        self.max_turns, self.kwargs = max_turns, kwargs.copy()
        self.kwargs.pop("max_tokens", None)

    async def run(self, data: dict, **extra_kwargs):
        http_client = extra_kwargs.get("http_client", None)
        base_url = extra_kwargs.get("base_url", None) or os.getenv("OPENAI_BASE_URL")
        api_key = extra_kwargs.get("api_key", None) or os.getenv("OPENAI_API_KEY")
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        messages, rewards = data["messages"].copy(), {}
        for _ in range(self.max_turns):
            response: ChatCompletion = await client.chat.completions.create(
                messages=messages, model="default", **self.kwargs
            )
            message = response.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            reward = await AsyncRewardWrapper(says)(completions=message.content, answer=data["answer"])
            rewards[response.id] = reward
            messages.append({"role": "user", "content": "Wrong. Try again."})
        return rewards if self.max_turns > 1 else reward
"""

ANSWER_LEN = 5
ROW = {"messages": [{"role": "user", "content": "Count."}], "answer": ANSWER_LEN}
GCONFIG = GenerationHyperparameters(max_new_tokens=8)
_names = itertools.count()


@pytest.fixture
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a file with `areal` renamed in its imports, and return the name of its module."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)

    def write(source: str) -> str:
        name = f"areal_file_{next(_names)}"
        source = re.sub(r"^(\s*from) areal\b", r"\1 areal_lite", source, flags=re.MULTILINE)
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    return write


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def engine(tokenizer_path: str) -> Iterator[RemoteInfEngine]:
    with StubThread(StubServer(answer_len=ANSWER_LEN)) as stub:
        config = InferenceEngineConfig(
            backend="sglang", addresses=[stub.address], tokenizer_path=tokenizer_path, gconfig=GCONFIG
        )
        with RemoteInfEngine(config) as engine:
            yield engine


def run(engine: RemoteInfEngine, workflow: str, answer: int = ANSWER_LEN, **kwargs: Any) -> Group:
    (group,) = engine.rollout_batch([{**ROW, "answer": answer}], workflow, kwargs, group_size=2)
    assert group.status == "accepted", group.error
    return group


@pytest.mark.parametrize(("answer", "reward"), [(ANSWER_LEN, 1.0), (0, 0.0)])
def test_a_single_turn_workflow(
    engine: RemoteInfEngine, renamed: Any, tokenizer_path: str, answer: int, reward: float
) -> None:
    kwargs = {"reward_fn": "rewards.count_tokens", "gconfig": GCONFIG, "tokenizer": tokenizer_path}
    group = run(engine, f"{renamed(SINGLE_TURN)}.SingleTurn", answer, **kwargs)
    assert group.rewards == [reward, reward]
    assert engine.take_scalars() == {"rollout/reward": reward}
    assert engine.take_scalars() == {}


def test_a_workflow_with_several_attempts(engine: RemoteInfEngine, renamed: Any, tokenizer_path: str) -> None:
    kwargs = {"gconfig": GCONFIG, "tokenizer": tokenizer_path, "max_turns": 2, "turn_discount": 0.5}
    module = renamed(RETRY)
    reward_fn = importlib.import_module("rewards").count_tokens
    group = run(engine, f"{module}.Retry", 0, reward_fn=reward_fn, **kwargs)
    assert [len(t.sequences) for t in group.trajectories] == [2, 2]
    assert engine.take_scalars() == {"rollout/reward": 0.0, "rollout/num_turns": 2.0}


@pytest.mark.parametrize(("style", "sequences"), [("individual", 2), ("concat", 1)])
def test_a_workflow_with_areals_client(
    engine: RemoteInfEngine, renamed: Any, tokenizer_path: str, style: str, sequences: int
) -> None:
    kwargs = {"gconfig": GCONFIG, "tokenizer": tokenizer_path, "max_turns": 2, "style": style}
    module = renamed(CLIENT)
    reward_fn = importlib.import_module("rewards").count_tokens
    group = run(engine, f"{module}.Client", 0, reward_fn=reward_fn, **kwargs)
    assert [len(t.sequences) for t in group.trajectories] == [sequences] * 2
    counts = {"answers": 2.0, "clean_turns": 2.0, "forks": 0.0, "forked_tokens": 0.0}
    counts |= {"tool_calls": 0.0, "tool_parse_errors": 0.0, "cut_answers": 0.0}
    assert [t.counts for t in group.trajectories] == [counts] * 2
    recorded = {"reward": 0.0, "num_turns": 2.0, **counts}
    assert engine.take_scalars() == {f"rollout/{name}": value for name, value in recorded.items()}


@pytest.mark.parametrize(("max_turns", "sequences"), [(1, 1), (2, 2)])
def test_an_agent(engine: RemoteInfEngine, renamed: Any, max_turns: int, sequences: int) -> None:
    group = run(engine, f"{renamed(AGENT)}.MathAgent", max_turns=max_turns, max_tokens=64, temperature=1.0)
    assert [len(t.sequences) for t in group.trajectories] == [sequences] * 2
    assert set(group.rewards) == {0.0}


ANTHROPIC = """
import os
import anthropic
from areal.api import AsyncRewardWrapper
from rewards import says

class MathAgent:
    def __init__(self, **kwargs):
        self.kwargs = kwargs

    async def run(self, data: dict, **extra_kwargs) -> float:
        client = anthropic.AsyncAnthropic(
            api_key=extra_kwargs.get("api_key", None), base_url=extra_kwargs.get("base_url", None),
            http_client=extra_kwargs.get("http_client", None), max_retries=0,
        )
        response = await client.messages.create(
            model="default", messages=data["messages"], system=anthropic.NOT_GIVEN, **self.kwargs
        )
        text = "".join(block.text for block in response.content if isinstance(block, anthropic.types.TextBlock))
        return await AsyncRewardWrapper(says)(text, data["answer"])
"""


def test_an_agent_of_anthropic_with_the_base_url_that_it_is_given(engine: RemoteInfEngine, renamed: Any) -> None:
    assert set(run(engine, f"{renamed(ANTHROPIC)}.MathAgent", max_tokens=8).rewards) == {0.0}


LANGCHAIN = """
from langchain_openai import ChatOpenAI
from areal.api import AsyncRewardWrapper
from rewards import says

class MathAgent:
    async def run(self, data, **extra_kwargs):
        llm = ChatOpenAI(
            model="default", base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"],
            http_async_client=extra_kwargs["http_client"], max_retries=0,
        )
        answer = await llm.ainvoke([("user", data["messages"][-1]["content"])])
        return await AsyncRewardWrapper(says)(completions=answer.content, answer=data["answer"])
"""


def test_an_agent_of_langchain(engine: RemoteInfEngine, renamed: Any) -> None:
    pytest.importorskip("langchain_openai")
    assert set(run(engine, f"{renamed(LANGCHAIN)}.MathAgent").rewards) == {0.0}


def test_the_reward_of_gsm8k_compares_values() -> None:
    pytest.importorskip("math_verify")
    from areal_lite.reward import get_math_verify_worker
    from areal_lite.reward.gsm8k import gsm8k_reward_fn

    def reward(completions: str, answer: str) -> float:
        return gsm8k_reward_fn("", completions, [], [], answer, question="?")

    assert reward("Half of 36, so the answer is 18.", "36 / 2 = 18\n#### 18") == 1.0
    assert reward("$\\frac{1}{2}$", "0.5") == 1.0
    assert reward("\\boxed{17}", "#### 18") == 0.0
    assert reward("I do not know", "#### 18") == 0.0
    assert get_math_verify_worker() is get_math_verify_worker()
    with pytest.raises(ValueError, match="no number or formula in the reference answer 'none'"):
        reward("18", "none")


def test_without_math_verify_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "areal_lite.areal.math_reward", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'areal-lite\[math\]'"):
        from areal_lite.reward import MathVerifyWorker  # noqa: F401


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        (
            "from areal_lite import PPOTrainer, workflow_context",
            "areal_lite has no PPOTrainer: `areal-lite train",
        ),
        ("from areal_lite.trainer import SFTTrainer", "`areal-lite sft run.yaml`"),
        ("from areal_lite.api.cli_args import GRPOConfig, load_expr_config", "the run's YAML"),
        ("from areal_lite.api import ModelAllocation", "rollout.addresses"),
        ("from areal_lite.dataset import get_custom_dataset", "train_dataset.path"),
        ("from areal_lite.infra import LocalScheduler", "areal-lite train"),
        ("from areal_lite.utils.stats_tracker import denominator", "stats_tracker.get"),
        ("from areal_lite.experimental.openai import OpenAIProxyWorkflow", "`workflow` in the run's YAML"),
    ],
)
def test_a_name_of_areal_that_is_missing_says_what_replaces_it(statement: str, says: str) -> None:
    with pytest.raises(ImportError, match=re.escape(says)):
        exec(statement)


def test_other_missing_names_are_ordinary_errors_and_no_replaced_name_exists() -> None:
    import areal_lite
    from areal_lite import api
    from areal_lite.api import cli_args

    assert not hasattr(areal_lite, "nothing")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from areal_lite.api import Nothing  # type: ignore[attr-defined] # noqa: F401
    replaced = {name for row in table()["missing"] for name in row.get("names", ())}
    assert replaced and not replaced & {*vars(areal_lite), *api.__all__, *vars(cli_args)}


def test_numbers_are_recorded_inside_an_episode_only() -> None:
    from areal_lite.utils import stats_tracker
    from areal_lite.rollout import workflow_context

    for record in (stats_tracker.get("rollout").scalar, workflow_context.record):
        with pytest.raises(RuntimeError, match="reward cannot be recorded here: metrics belong to a running"):
            record(reward=1.0)
