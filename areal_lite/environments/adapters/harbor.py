"""``harbor:FOLDER``: tasks in Harbor's format, each in a container of docker, judged by the task's own tests.

An episode has a container of its own, which ends with it, and after a day if the run cannot end it.
"""

import asyncio
import json
import os
import re
import tomllib
import uuid
from functools import cache
from pathlib import Path
from typing import Any
from areal_lite.environments.adapters.task_split import FIRST_HELD_OUT, task_of
from areal_lite.environments.environment import Step, ToolCall
from areal_lite.errors import ConfigError

_A_DAY_S = "86400"
_FIRST_BYTES, _LAST_BYTES = 9_000, 1_000  # of what a command prints
_PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
_BASH = {"name": "bash", "description": "Run a command and return what it prints.", "parameters": _PARAMETERS}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class HarborTask:
    """A folder with task.toml, instruction.md, environment/ and tests/.

    The model has one tool, ``bash``, and ends with an answer of text. The container's files, without its processes, go
    to a fresh container then, where tests/test.sh leaves /logs/verifier/reward.json or reward.txt.

    Args:
        folder: Such a folder, or one of them: rows that are held out take the last tenth.
        docker: Program with docker's command line; DOCKER_HOST says where its daemon is.
        network: Let the model's commands use the network where the task does too. Tests use it where the task does.
        command_s: Limit on one command, in seconds; what runs longer has the exit code 124. The commands of an answer
            share the loop's ``timeout_s``.
        max_commands: Answers with commands after which the task is judged and the episode truncated, as after its own
            time. Keep it below the loop's ``max_turns``, which counts wrong calls too and ends without a judgement.
        reward_key: The reward among those of reward.json; the others are metrics.
    """

    def __init__(
        self,
        folder: str,
        *,
        docker: str = "docker",
        network: bool = False,
        command_s: int = 30,
        max_commands: int = 25,
        reward_key: str = "reward",
    ) -> None:
        self._tasks, self._program, self._network = tasks_of(folder), docker, network
        self._command_s, self._max_commands, self._reward_key = command_s, max_commands, reward_key
        self._containers: list[str] = []
        self._images: list[str] = []

    @staticmethod
    def check(folder: str) -> None:
        """Check that there are tasks, and that all can be played; raises ConfigError."""
        tasks_of(folder)

    @staticmethod
    def rows(folder: str, size: int = 500, seed: int = 0) -> list[dict[str, Any]]:
        """Return rows with the names of their tasks, each task once."""
        tasks = tasks_of(folder)
        held_out = -(-len(tasks) // 10)
        most = held_out if seed >= FIRST_HELD_OUT else max(len(tasks) - held_out, 1)
        numbers = range(seed, seed + min(size, most))
        names = (tasks[task_of(number, len(tasks))].name for number in numbers)
        return [{"number": number, "task": name} for number, name in zip(numbers, names, strict=True)]

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        self._task = self._tasks[task_of(int(row["number"]), len(self._tasks))]
        self._config = tomllib.loads((self._task / "task.toml").read_text())
        self._about = self._config.get("environment", {})
        image = self._about.get("docker_image") or await self._docker("build", "-q", str(self._task / "environment"))
        await self._start(image.split()[-1], network=self._network)
        limit_s = self._config.get("agent", {}).get("timeout_sec", float("inf"))
        self._deadline, self._answers = asyncio.get_running_loop().time() + limit_s, 0
        return (self._task / "instruction.md").read_text()

    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": _BASH}]

    async def step(self, action: str | list[ToolCall]) -> Step:
        if isinstance(action, str):
            return await self._judged(done=True)
        results = [call.result(await self._bash(str(call.arguments["command"]))) for call in action]
        self._answers += 1
        if self._answers >= self._max_commands or asyncio.get_running_loop().time() > self._deadline:
            return await self._judged(done=False)
        return Step(results)

    async def close(self) -> None:
        for command, names in (("rm", self._containers), ("rmi", self._images)):
            if names:  # one that was not made yet is no problem
                await self._docker(command, "--force", *names, may_fail=True)

    async def _start(self, image: str, *, network: bool) -> None:
        allowed = network and self._about.get("allow_internet", True)
        options = [f"--network={'bridge' if allowed else 'none'}", "--pids-limit=4096", *_variables(self._about)]
        options += [f"--{name}={self._about[key]}{unit}" for key, name, unit in _RESOURCES if key in self._about]
        self._containers.append(name := f"areal-lite-{uuid.uuid4().hex}")
        command = ["run", "--detach", "--rm", "--init", f"--name={name}", *options]
        await self._docker(*command, "--entrypoint=sleep", image, _A_DAY_S)

    async def _bash(self, command: str) -> str:
        limit = ["timeout", "--kill-after=1", str(self._command_s)]
        return await self._docker("exec", self._containers[-1], *limit, "bash", "-c", command, may_fail=True)

    async def _judged(self, *, done: bool) -> Step:
        self._images.append(f"areal-lite:{uuid.uuid4().hex}")
        await self._docker("commit", self._containers[-1], self._images[-1])
        await self._start(self._images[-1], network=True)
        box, about = self._containers[-1], self._config.get("verifier", {})
        await self._docker("exec", "--user=root", box, "rm", "-rf", "/tests", "/logs/verifier")
        await self._docker("exec", "--user=root", box, "mkdir", "-p", "-m", "777", "/logs/verifier")
        await self._docker("cp", str(self._task / "tests"), f"{box}:/tests")
        async with asyncio.timeout(about.get("timeout_sec")):
            said = await self._docker("exec", *_variables(about), box, "bash", "/tests/test.sh", may_fail=True)
        read = "cat /logs/verifier/reward.json 2>/dev/null || cat /logs/verifier/reward.txt"
        try:
            scores = json.loads(await self._docker("exec", box, "sh", "-c", read))
            scores = scores if isinstance(scores, dict) else {self._reward_key: scores}
            reward = float(scores.pop(self._reward_key))
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            problem = f"task {self._task.name}: tests/test.sh left no reward ({error!r}); it said: {said[-500:]}"
            raise RuntimeError(problem) from None
        return Step("", reward, done, not done, scores)

    async def _docker(self, *words: str, may_fail: bool = False) -> str:
        """Return what a command of docker prints, of much only the beginning and the end."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._program, *words, stdout=pipe, stderr=asyncio.subprocess.STDOUT if may_fail else pipe
        )
        try:
            streams = (process.stdout, process.stderr)
            text, *errors = await asyncio.gather(*(_printed(stream) for stream in streams if stream is not None))
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode and not may_fail:
            raise RuntimeError(f"{self._program} {words[0]} failed: {errors[0].strip() or text}")
        return f"{text}[exit code {process.returncode}]" if process.returncode else text


async def _printed(stream: asyncio.StreamReader) -> str:
    first, last, left_out = b"", b"", 0
    while part := await stream.read(2**16):
        room = _FIRST_BYTES - len(first)
        first, last = first + part[:room], last + part[room:]
        left_out += max(len(last) - _LAST_BYTES, 0)
        last = last[-_LAST_BYTES:]
    return (first + (f"\n[{left_out} bytes left out]\n".encode() if left_out else b"") + last).decode(errors="replace")


_RESOURCES = ("cpus", "cpus", ""), ("memory_mb", "memory", "m"), ("memory", "memory", "")


@cache
def tasks_of(folder: str) -> list[Path]:
    """Return the folders of tasks in order of their names; raises ConfigError."""
    root = Path(folder)
    tasks = [root] if (root / "task.toml").exists() else sorted(path.parent for path in root.glob("*/task.toml"))
    if not tasks:
        raise ConfigError(f"env harbor:{folder}: no task.toml in it or in a folder of it")
    for task in tasks:
        about = tomllib.loads((task / "task.toml").read_text())
        missing = [name for name in ("instruction.md", "tests/test.sh") if not (task / name).exists()]
        unknown = ["steps"] * ("steps" in about) + ["mcp_servers"] * ("mcp_servers" in about.get("environment", {}))
        unknown += [path.name for path in (task / "environment").glob("docker-compose.y*ml")]
        if missing or unknown:
            problem = f"{missing[0]} is missing" if missing else f"{unknown[0]} is not supported"
            raise ConfigError(f"env harbor:{folder}: task {task.name}: {problem}; move the task out of the folder")
    return tasks


def _variables(about: dict[str, Any]) -> list[str]:
    """Return options for a section's ``env``, with ``${NAME}`` and ``${NAME:-default}`` of this process."""

    def value(found: re.Match[str]) -> str:
        if (set_here := os.environ.get(found[1], found[2])) is None:
            raise RuntimeError(f"the task needs the environment variable {found[1]}, which is not set")
        return set_here

    return [f"--env={name}={_VARIABLE.sub(value, str(text))}" for name, text in about.get("env", {}).items()]
