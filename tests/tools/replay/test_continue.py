"""A dumped episode run again from a turn."""

from __future__ import annotations
import asyncio
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any
import pytest
from rich.console import Console
from areal_lite.api import InferenceEngine, RolloutWorkflow, episode_context
from areal_lite.api.episode_context import Episode
from areal_lite.errors import ConfigError
from areal_lite.tools.replay.branching_workflow import Continuation, Fork
from areal_lite.tools.replay.continue_command import add_arguments
from areal_lite.tools.replay.continue_episode import continue_episode
from tests.tools.replay.agents import TwoCallsAgent


def lines(run: Path, task: int | str) -> list[dict[str, Any]]:
    (path,) = run.glob(f"rollout/*/{task}.jsonl")
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def ids(turns: list[dict[str, Any]]) -> list[list[int]]:
    return [turn["ids"] for turn in turns]


def chosen(**options: Any) -> Namespace:
    """Return the options of the command, with its defaults."""
    parser = ArgumentParser()
    add_arguments(parser)
    return Namespace(**vars(parser.parse_args(["RUN", "--task=0", "--turn=0"])) | options)


def task(run: Path, *, forks: bool) -> str:
    """Return the task of a row on which the agent forks, or does not."""
    found = [path.stem for path in sorted(run.glob("rollout/*/*.jsonl"))]
    return next(name for name in found if lines(run, name)[0]["row"]["forks"] is forks)


def test_turns_before_k_are_kept_and_the_branch_is_an_episode_that_names_its_parent(plain_run: Path) -> None:
    name = task(plain_run, forks=False)
    original = next(line for line in lines(plain_run, name) if line["member_idx"] == 1)
    console = Console(record=True, width=160)
    options = chosen(path=plain_run, task=name, member=1, turn=3, n=2, overrides=["rollout.gconfig.max_new_tokens=9"])
    run_dir = continue_episode(options, console=console)
    assert run_dir == plain_run.with_name("plain-continued")
    branches = lines(run_dir, 0)
    assert [branch["member_idx"] for branch in branches] == [0, 1]
    for branch in branches:
        assert ids(branch["turns"][:3]) == ids(original["turns"][:3])
        assert branch["turns"][1]["logprobs"] == original["turns"][1]["logprobs"]
        assert branch["status"] == "accepted"
        assert branch["extra"]["continues"] == {
            **{"run": str(plain_run), "task_id": int(name), "member_idx": 1, "turn_idx": 3},
        }
    assert len({tuple(branch["turns"][3]["ids"]) for branch in branches}) == 2
    text = console.export_text()
    assert "turns before these: 3, the same in all" in text
    assert f"task_id {name}, member_idx 1, turn_idx 3" in " ".join(text.split())


def test_an_agent_that_does_not_repeat_its_calls_is_stopped_with_the_turn_and_the_difference(
    plain_run: Path, tiny_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoCallsAgent, "clock", 7)
    options = chosen(
        path=plain_run,
        task=task(plain_run, forks=False),
        turn=3,
        address=tiny_server,
        overrides=[f"fileroot={tmp_path}"],
    )
    with pytest.raises(ConfigError, match=r"turn 2 is not repeated: .* the dump has '0<.* the agent sends '7<"):
        continue_episode(options)
    assert not list(tmp_path.rglob("*.jsonl"))
    run_dir = continue_episode(Namespace(**vars(options) | {"turn": 2}))  # the turn itself may differ
    assert lines(run_dir, 0)[0]["turns"][2]["text"].count("again at 7") == 1


def test_say_replaces_the_last_user_message_before_the_turn(plain_run: Path, tiny_server: str, tmp_path: Path) -> None:
    name = task(plain_run, forks=False)
    options = chosen(
        path=plain_run, task=name, turn=3, say="what else?", address=tiny_server, overrides=[f"fileroot={tmp_path}"]
    )
    (branch,) = lines(continue_episode(options), 0)
    original = lines(plain_run, name)[0]
    assert ids(branch["turns"][:2]) == ids(original["turns"][:2])
    then, now = (line["turns"][2]["text"] for line in (original, branch))
    assert now == then.replace("again at 0", "what else?")
    first = lines(continue_episode(Namespace(**vars(options) | {"turn": 0})), 1)[0]
    assert [turn["text"].count("what else?") for turn in first["turns"]] == [1, 0, 0, 0]


def test_calls_of_other_conversations_before_the_turn_are_kept(
    plain_run: Path, tiny_server: str, tmp_path: Path
) -> None:
    name = task(plain_run, forks=True)
    before = [line for line in lines(plain_run, name) if line["member_idx"] == 0]
    assert len(before) == 2  # the episode forked
    last = max((turn for line in before for turn in line["turns"]), key=lambda turn: turn.get("started") or 0.0)
    overrides = [f"fileroot={tmp_path}", "rollout.gconfig.max_new_tokens=9"]
    options = chosen(path=plain_run, task=name, turn=last["turn_idx"], address=tiny_server, overrides=overrides)
    after = lines(continue_episode(options), 0)
    assert ids(after[0]["turns"]) == ids(before[0]["turns"])
    assert ids(after[1]["turns"][:-1]) == ids(before[1]["turns"][:-1])
    assert ids(after[1]["turns"]) != ids(before[1]["turns"])


def test_kept_calls_are_those_that_began_before_the_turn() -> None:
    def line(*turns: tuple[int, str, float | None]) -> dict[str, Any]:
        parents = [None, *(turn_idx for turn_idx, _, _ in turns)]
        return {
            "turns": [
                {"turn_idx": i, "parent_idx": parent, "role": role, "started": started, "start": at, "ids": [i]}
                for at, ((i, role, started), parent) in enumerate(zip(turns, parents, strict=False))
            ]
        }

    main = line((0, "prompt", None), (1, "assistant", 1.0), (2, "environment", None), (3, "assistant", 9.0))
    fork = Fork.at([main, line((4, "prompt", None), (5, "assistant", 5.0))], 3)
    assert [call.prompt for call in fork.kept] == [(0,), (4,)]
    assert (fork.first.prompt, fork.num_fixed, fork.later) == ((0, 1, 2), 3, [])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"turn": 9}, "--turn 9: the episode has the turns 0, 1, 2, 3"),
        ({"task": "99"}, "no episode with task 99 and member 0"),
        ({"member": 5}, "no episode with task . and member 5"),
        ({"overrides": ["trial_name=plain"]}, "is the run itself"),
        ({"overrides": ["rollout.group=1"]}, "unknown key 'group'"),
        ({"model": "/nowhere"}, "'/nowhere' does not exist"),
    ],
)
def test_what_cannot_be_continued_is_one_sentence_before_anything_starts(
    plain_run: Path, changed: dict[str, Any], message: str
) -> None:
    options = chosen(path=plain_run, task=task(plain_run, forks=False), turn=3)
    with pytest.raises(ConfigError, match=message):
        continue_episode(Namespace(**vars(options) | changed))


def test_a_workflow_that_ends_early_or_writes_its_own_prompts(plain_run: Path) -> None:
    fork = Fork.at(lines(plain_run, task(plain_run, forks=False))[:1], 3)
    with pytest.raises(ConfigError, match="CallsNothing writes its own prompts: leave --say out"):
        Continuation(CallsNothing(), fork, None, say="x")
    continuation = Continuation(CallsNothing(), fork, None)

    async def run() -> None:
        episode_context.enter(episode_context.EpisodeContext(episode=Episode()))
        await continuation.arun_episode(None, {})  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="the agent ended without the model call of turn 1"):
        asyncio.run(run())
    assert continuation.difference is not None


class CallsNothing(RolloutWorkflow):
    """Makes no call."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
        """Return at once."""
