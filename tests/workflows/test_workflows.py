"""Each workflow file and agent that is made to be copied runs, and its rewards are right."""

from __future__ import annotations
import asyncio
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
import pytest
from areal_lite.agents.agent_workflow import AgentWorkflow
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig
from areal_lite.api.tensor_dict import tensor_dict_of
from areal_lite.api.turn_tree import trajectory_of
from tests.agents.scripted_engine import ScriptedEngine, tokenizer
from workflows import calculator, largest_number
from workflows.multi_turn import MultiTurnWorkflow
from workflows.single_turn import SingleTurnWorkflow


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    return path


def run(workflow: Any, row: dict[str, Any], answers: list[Any]) -> tuple[dict[str, Any], ScriptedEngine]:
    engine = ScriptedEngine(answers)
    tensors = tensor_dict_of([trajectory_of(asyncio.run(workflow.arun_episode(engine, row)), [])])
    assert tensors is not None
    return tensors, engine


def run_agent(agent: Any, row: dict[str, Any], answers: list[Any], path: Path) -> float:
    workflow = AgentWorkflow(agent, InferenceEngineConfig(tokenizer_path=str(path)))
    (reward,) = run(workflow, row, answers)[0]["rewards"].tolist()
    return float(reward)


async def is_four(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    assert tokenizer().encode(prompt, add_special_tokens=False) == prompt_ids
    assert tokenizer().decode(completion_ids) == completion + "<|im_end|>"
    return float(completion == row["answer"])


@pytest.mark.parametrize(
    "row",
    [{"prompt": "2 + 2?"}, {"question": "2 + 2?"}, {"messages": [{"role": "user", "content": "2 + 2?"}]}],
)
def test_single_turn(row: dict[str, Any], tokenizer_path: Path) -> None:
    workflow = SingleTurnWorkflow(is_four, {"max_new_tokens": 8}, str(tokenizer_path), system_prompt="Count.")
    tensors, engine = run(workflow, {**row, "answer": "4"}, ["4"])
    assert tensors["rewards"].tolist() == [1.0]
    sampled = engine.responses[0]
    prompt = tokenizer().decode(sampled.input_tokens)
    assert prompt.startswith("<|im_start|>system\n" + ("You are helpful." if "messages" in row else "Count."))
    assert prompt.endswith("2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    given = sampled.input_len
    assert tensors["input_ids"][0].tolist() == sampled.input_tokens + sampled.output_tokens
    assert tensors["loss_mask"][0].tolist() == [0] * given + [1] * sampled.output_len
    assert tensors["versions"][0].tolist() == [-1] * given + sampled.output_versions
    assert tensors["logprobs"][0, given:].tolist() == sampled.output_logprobs
    assert engine.requests[0].gconfig.stop_token_ids == [tokenizer().eos_token_id]
    with pytest.raises(ValueError, match="it needs 'messages'"):
        run(workflow, {"text": "?"}, [])


@pytest.mark.parametrize(
    ("answers", "reward"), [(["4"], 1.0), (["5", "4"], 0.5), (["5", "6", "4"], 0.25), (["5", "6", "7"], 0.0)]
)
def test_multi_turn_is_one_sequence_with_a_discounted_reward(answers: list[str], reward: float) -> None:
    path = f"{__name__}.is_four" if __name__.startswith("tests.") else is_four
    gconfig = GenerationHyperparameters(max_new_tokens=8)
    workflow = MultiTurnWorkflow(path, gconfig, tokenizer(), max_turns=3, turn_discount=0.5)
    tensors, engine = run(workflow, {"question": "2 + 2?", "answer": "4"}, answers)
    assert tensors["rewards"].tolist() == [reward]
    assert len(engine.requests) == len(answers)
    trained = tokenizer().decode(tensors["input_ids"][0][tensors["loss_mask"][0].bool()])
    assert trained == "".join(f"{answer}<|im_end|>" for answer in answers)


@pytest.mark.parametrize("make", [SingleTurnWorkflow, MultiTurnWorkflow])
def test_a_prepared_prompt_is_asked_as_it_is(make: Any) -> None:
    ids = tokenizer().encode("cut in the mid", add_special_tokens=False)
    row = {"question": "not asked", "answer": "4", "raw_prompt_ids": ids}
    answers = ["4"] if make is SingleTurnWorkflow else ["5", "4"]
    tensors, engine = run(make(is_four, GenerationHyperparameters(max_new_tokens=8), tokenizer()), row, answers)
    assert engine.responses[0].input_tokens == ids
    for before, response in zip(engine.responses, engine.responses[1:], strict=False):
        asked = response.input_tokens[before.input_len + before.output_len :]
        assert response.input_tokens[: -len(asked)] == before.input_tokens + before.output_tokens
        assert tokenizer().decode(asked).endswith("Please try to answer it again.<|im_end|>\n<|im_start|>assistant\n")
    assert tensors["rewards"].tolist() == pytest.approx([1.0 if make is SingleTurnWorkflow else 0.9])


async def by_token(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> Any:
    return {"score": [float(id) for id in completion_ids], "length": len(completion_ids)}


def test_single_turn_rewards_tokens_and_multi_turn_says_that_it_does_not(tokenizer_path: Path) -> None:
    tensors, engine = run(SingleTurnWorkflow(by_token, {}, str(tokenizer_path)), {"prompt": "2 + 2?"}, ["4"])
    sampled = engine.responses[0]
    assert tensors["token_rewards"].tolist() == [[0.0] * sampled.input_len + sampled.output_tokens]
    assert tensors["rewards"].tolist() == [sum(sampled.output_tokens)]
    with pytest.raises(ValueError, match="rewards tokens one by one, and this workflow whole episodes"):
        run(MultiTurnWorkflow(by_token, {}, tokenizer()), {"prompt": "2 + 2?"}, ["4"])


@pytest.mark.parametrize(
    ("answer", "reward"), [("89", 1.0), ("It is 89.", 1.0), ("12", 0.0), ("89 or 7", 0.0), ("none", 0.0)]
)
def test_largest_number(answer: str, reward: float, tokenizer_path: Path) -> None:
    row = {"question": "Which is the largest number: 12, 89, 41, 7?", "answer": "89"}
    assert run_agent(largest_number.LargestNumberAgent(), row, [answer], tokenizer_path) == reward


def test_largest_number_rows_are_made_from_the_seed() -> None:
    rows = largest_number.rows(size=50, seed=3)
    assert rows == largest_number.rows(size=50, seed=3) != largest_number.rows(size=50, seed=4)
    for row in rows:
        numbers = [int(n) for n in row["question"].removesuffix("?").split(": ")[1].split(", ")]
        assert len(set(numbers)) == 4
        assert 1 <= min(numbers) <= max(numbers) == int(row["answer"]) <= 99


def tool_call(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([tool_call("(3 + 4) * 12"), "The result is 84"], 1.0),
        ([tool_call("3 +"), tool_call("(3 + 4) * 12"), "84"], 1.0),
        (["83"], 0.0),
        ([tool_call("1")] * 4, 0.0),
    ],
)
def test_calculator(answers: list[str], reward: float, tokenizer_path: Path) -> None:
    row = {"question": "What is (3 + 4) * 12?", "answer": "84"}
    assert run_agent(calculator.CalculatorAgent(), row, answers, tokenizer_path) == reward


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("1 + 2 * 3", "7"),
        ("-(2 ** 10) // 3", "-342"),
        ("7 / 2", "3.5"),
        ("1 / 0", "error"),
        ("9 ** 9 ** 9 ** 9", "error"),
        ("(-8) ** 0.5", "error"),
        ("1e999", "error"),
        ("__import__('os')", "error"),
        ("True + 1", "error"),
        ("(" * 150 + ")" * 50, "error"),
        ("1" * 300, "error"),
        ("", "error"),
    ],
)
def test_the_calculator_does_arithmetic_and_nothing_else(expression: str, says: str) -> None:
    assert calculator.use_tool("calculator", json.dumps({"expression": expression})).startswith(says)
    for other in ("3", "[1, 2]", "null"):
        assert calculator.use_tool("calculator", f'{{"expression": {other}}}').startswith("error")
    assert calculator.use_tool("shell", "{}").startswith("error")
    assert all("error" not in row["answer"] for row in calculator.rows(20))


@pytest.fixture
def reasoning_gym() -> Any:
    """Return the workflow's module, whose library takes a second to import."""
    pytest.importorskip("reasoning_gym")
    return importlib.import_module("workflows.reasoning_gym")


def test_reasoning_gym_scores_as_the_task_does(tokenizer_path: Path, reasoning_gym: Any) -> None:
    gym = pytest.importorskip("reasoning_gym")
    row = {**gym.create_dataset("chain_sum", size=1, seed=1)[0], "task": "chain_sum"}
    answers = [f"<think>42</think>Sure.\n<answer> {row['answer']} </answer>"]
    assert run_agent(reasoning_gym.ReasoningGymAgent(), row, answers, tokenizer_path) == 1.0
    assert reasoning_gym.score("chain_sum", "no number", row) < 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [("a\n<answer>1</answer> <answer>\n2 </answer>", "2"), ("so\nit is -4.5.", "-4.5"), ("yes\nnorth", "north"),
     ("", ""), ("3 + 4 = 7", "7"), ("x=7", "7"), ("A=1, B=7", "A=1, B=7"), ("costs: $ 12", "12"),
     ("that is (2)=3", "3"), ("a: 4.", "4"), ("3/10", "3/10"), ("2, 3", "2, 3"), ("1 2\n3 4", "1 2\n3 4"),
     ("so this:\n3 4", "3 4"), ("</think>\n5\n6", "6")],
)  # fmt: skip
def test_final_answer(text: str, answer: str, reasoning_gym: Any) -> None:
    assert reasoning_gym.final_answer(text) == answer


UNTAGGED = (
    "basic_arithmetic chain_sum countdown dice fraction_simplification largest_island leg_counting mini_sudoku "
    "n_queens number_sorting polynomial_multiplication prime_factorization rotate_matrix simple_equations "
    "spell_backward spiral_matrix time_intervals"
)


@pytest.mark.parametrize("task", UNTAGGED.split())
def test_a_right_answer_needs_no_tags(task: str, reasoning_gym: Any) -> None:
    gym = pytest.importorskip("reasoning_gym")
    for row in gym.create_dataset(task, size=5, seed=3):
        answer = reasoning_gym.final_answer(row["answer"])
        assert reasoning_gym.score(task, answer, row) == reasoning_gym.score(task, row["answer"], row) > 0.9


PROGRAM = """import json, os, sys, urllib.request
body = {"model": "default", "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""


@pytest.mark.parametrize(
    ("page", "agent", "answers", "reward"),
    [
        ("agents", "Agent", ["It is 4."], 1.0),
        ("agents", "Agent", ["It is 5."], 0.0),
        ("agents", "ProgramAgent", ["4"], 1.0),
        ("several_turns", "RetryAgent", ["5", "6", "4"], 0.64),
        ("several_turns", "RetryAgent", ["5", "6", "7"], 0.0),
    ],
)
def test_an_agent_of_the_documentation(
    page: str, agent: str, answers: list[str], reward: float, tokenizer_path: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    text = (Path(__file__).parents[2] / f"docs/{page}.md").read_text()
    (code,) = (c for c in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if f"class {agent}:" in c)
    names: dict[str, Any] = {}
    exec(compile(code, page, "exec"), names)
    (tmp_path / "my-agent").write_text(f"#!{sys.executable}\n{PROGRAM}")
    (tmp_path / "my-agent").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert run_agent(names[agent](), {"question": "2 + 2?", "answer": "4"}, answers, tokenizer_path) == pytest.approx(
        reward
    )
