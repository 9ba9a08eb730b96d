"""Tasks in Harbor's format, in real containers where a daemon of docker has the image that a variable names."""

from __future__ import annotations
import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
import pytest
from areal_lite.environments import Step, ToolCall
from areal_lite.environments.adapters.task_split import task_of
from areal_lite.environments.catalog import environment_maker, rows
from areal_lite.errors import ConfigError

IMAGE = os.environ.get("AREAL_LITE_DOCKER_IMAGE", "")
in_containers = [
    pytest.mark.environments,
    pytest.mark.skipif(not IMAGE, reason="AREAL_LITE_DOCKER_IMAGE names no image with bash, such as debian:12"),
]
LOOK = "if [ -f /app/hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"


def write_task(folder: Path, *, test: str = LOOK, toml: str = "", dockerfile: str = "") -> Path:
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(toml or f'version = "1.0"\n[environment]\ndocker_image = "{IMAGE}"\n')
    (folder / "instruction.md").write_text("Make an empty file /app/hello.")
    (folder / "tests/test.sh").write_text(test)
    (folder / "environment/Dockerfile").write_text(dockerfile)
    return folder


def bash(command: str) -> list[ToolCall]:
    return [ToolCall("a", "bash", {"command": command})]


def play(folder: Path, *actions: Any, **kwargs: Any) -> list[Any]:
    async def go() -> list[Any]:
        environment = environment_maker(f"harbor:{folder}", kwargs)()
        try:
            return [await environment.reset({"number": 0}, 3), *[await environment.step(each) for each in actions]]
        finally:
            await environment.close()

    return asyncio.run(go())


def containers() -> str:
    return subprocess.run(["docker", "ps", "--all", "--quiet"], capture_output=True, text=True, check=True).stdout


def text(step: Step) -> str:
    return str(step.messages[0]["content"])  # type: ignore[index]


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 40])
def test_no_task_that_is_trained_on_is_held_out(count: int) -> None:
    trained, held_out = ({task_of(first + n, count) for n in range(3 * count)} for first in (0, 1_000_000))
    assert trained | held_out == {*range(count)} and len(held_out) == -(-count // 10)
    assert count == 1 or not trained & held_out


def test_rows_have_each_task_once_and_name_it(tmp_path: Path) -> None:
    for name in "abcdefghijk":
        write_task(tmp_path / name)
    env = f"harbor:{tmp_path}"
    train, held_out = rows(env, {"size": 1000, "seed": 0}), rows(env, {"size": 100, "seed": 1_000_000})
    assert "".join(row["task"] for row in train) == "abcdefghi"
    assert held_out == [{"number": 1_000_000, "task": "k"}, {"number": 1_000_001, "task": "j"}]
    assert [row["task"] for row in rows(f"{env}/c", {"size": 9})] == ["c"]


def test_a_folder_without_tasks_or_with_one_that_cannot_be_played_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no task.toml in it or in a folder of it"):
        rows(f"harbor:{tmp_path}", {})
    task = write_task(tmp_path / "a")
    (task / "environment/docker-compose.yaml").touch()
    with pytest.raises(ConfigError, match=r"task a: docker-compose.yaml is not supported; move the task"):
        rows(f"harbor:{tmp_path}", {})
    shutil.rmtree(task)
    write_task(task, toml="[[environment.mcp_servers]]\nname='x'")
    with pytest.raises(ConfigError, match="task a: mcp_servers is not supported"):
        rows(f"harbor:{tmp_path}", {})
    (task / "instruction.md").unlink()
    with pytest.raises(ConfigError, match="task a: instruction.md is missing"):
        rows(f"harbor:{tmp_path}", {})


def test_of_much_that_a_command_prints_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\nif [ $1 = exec ]; then seq 99999; echo é >&2; exit 7; fi\n")
    program.chmod(0o755)
    task = write_task(tmp_path / "a", toml='[environment]\ndocker_image = "x"\n')
    _, seen = play(task, bash("x"), docker=str(program))
    first, left_out, last = re.split(r"\n\[(\d+) bytes left out\]\n", text(seen))
    printed = "".join(f"{number}\n" for number in range(1, 100_000)).encode() + "é\n".encode()
    assert (first.encode(), int(left_out)) == (printed[:9000], len(printed) - 10_000)
    assert last == printed[-1000:].decode() + "[exit code 7]"


class TestInContainers:
    pytestmark = in_containers

    def test_the_tests_judge_the_files_in_a_fresh_container(self, tmp_path: Path) -> None:
        before = containers()
        left = "cat /proc/[0-9]*/cmdline | tr -d '\\0' | grep -c 'sleep 123' > /logs/verifier/left"
        task = write_task(tmp_path / "a", test=f"{left}\n{LOOK}; cat /tests/test.sh /logs/verifier/*")
        fake = "mkdir -p /tests /logs/verifier /app; echo 1 > /logs/verifier/reward.txt; (sleep 123 &) ; echo made"
        first, made, end = play(task, bash(fake), "done")
        assert first == "Make an empty file /app/hello." and text(made) == "made\n"
        assert (end.reward, end.done, end.truncated) == (0.0, True, False)
        *_, end = play(task, bash("mkdir -p /app; touch /app/hello"), "done")
        assert end.reward == 1.0
        assert containers() == before

    def test_what_a_command_left_is_there_for_the_next_and_one_that_hangs_is_ended(self, tmp_path: Path) -> None:
        task = write_task(tmp_path / "a")
        commands = "cd /; echo é > /root/f; exit 3", "cat /root/f", "sleep 50; echo late", "seq 9999"
        _, failed, read, hung, long = play(task, *map(bash, commands), command_s=1)
        assert (text(failed), text(read), text(hung)) == ("[exit code 3]", "é\n", "[exit code 124]")
        assert (
            text(long).startswith("1\n2\n")
            and text(long).endswith("\n9999\n")
            and "\n[38888 bytes left out]\n" in text(long)
        )

    def test_a_limit_of_commands_truncates_and_judges(self, tmp_path: Path) -> None:
        task = write_task(tmp_path / "a")
        *_, end = play(task, bash("mkdir /app"), bash("touch /app/hello"), max_commands=2)
        assert (end.reward, end.done, end.truncated) == (1.0, False, True)

    def test_neither_model_nor_tests_have_a_network_that_the_task_forbids(self, tmp_path: Path) -> None:
        toml = (
            f'[environment]\ndocker_image = "{IMAGE}"\nallow_internet = false\n[environment.env]\nWORD = "${{W:-hi}}"\n'
        )
        look = "ls /sys/class/net | grep -v -c '^lo$' > /logs/verifier/reward.txt"
        task = write_task(tmp_path / "a", toml=toml, test=look)
        _, seen, end = play(task, bash("ls /sys/class/net; echo $WORD"), "done", network=True)
        assert text(seen) == "lo\nhi\n" and end.reward == 0.0

    def test_named_rewards_are_metrics_and_none_is_a_failure(self, tmp_path: Path) -> None:
        scores = """echo '{"reward": 0.5, "style": 2}' > /logs/verifier/reward.json; exit 1"""
        *_, end = play(write_task(tmp_path / "a", test=scores), "done")
        assert (end.reward, end.info) == (0.5, {"style": 2})
        with pytest.raises(RuntimeError, match=r"task b: tests/test.sh left no reward .*it said: broken"):
            play(write_task(tmp_path / "b", test="echo broken"), "done")

    def test_an_image_is_built_from_its_dockerfile(self, tmp_path: Path) -> None:
        dockerfile = f"FROM {IMAGE}\nRUN mkdir /app && echo built > /app/about\nWORKDIR /app\n"
        task = write_task(tmp_path / "a", toml='version = "1.0"', dockerfile=dockerfile)
        _, seen, made, end = play(task, bash("cat about"), bash("touch hello"), "done")
        assert (text(seen), text(made), end.reward) == ("built\n", "", 1.0)
