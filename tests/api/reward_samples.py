"""Reward functions the worker tests send by name; imports nothing, so that workers start fast."""

import os
import subprocess
import sys
from pathlib import Path


def same(prompt, completion, prompt_ids, completion_ids, answer="", **row):
    return float(completion == answer)


def echo(value):
    return value


def evaluate(text):
    """Return what the expression says: the tests' way to get any value out of a worker."""
    return eval(text, {"inf": float("inf"), "nan": float("nan")})


def evaluates_answer(prompt, completion, prompt_ids, completion_ids):
    return evaluate(completion)


def endless():
    while True:
        pass


def endless_in_c():
    return 9**9**9**9


def exits():
    os._exit(7)


def leaves():
    sys.exit(3)


def complains(text):
    raise KeyError(text)


def loaded_modules():
    return len([name for name in sys.modules if name.split(".")[0] in ("torch", "transformers", "pydantic")])


def process_id():
    return os.getpid()


def starts_a_child(path):
    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(str(child.pid))
    endless()


def forks(path):
    """Eight processes, all but this one replaced by their children again and again."""
    Path(path).write_text(str(os.getpid()))
    first = os.getpid()
    for _ in range(3):
        os.fork()
    while True:
        if os.getpid() != first and os.fork():
            os._exit(0)


def writes():
    while True:
        os.write(1, bytes(2**20))


def allocates(size):
    return len(bytearray(size)) > 0


async def judged(score):
    return score


async def judged_late():
    import asyncio

    await asyncio.Event().wait()


class Threshold:
    def __init__(self, limit):
        self.limit = limit

    def __call__(self, value):
        return value > self.limit


class AsyncJudge:
    async def __call__(self, value):
        return value


def fails_until(path, tries):
    with Path(path).open("a+") as file:
        file.write("x")
        file.seek(0)
        if len(file.read()) < tries:
            raise OSError("not yet")
    return 1
