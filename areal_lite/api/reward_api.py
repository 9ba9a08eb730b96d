"""Reward functions run off the event loop, in worker processes that can be killed.

A missing reward is a failure with its reason, never a 0: timeouts, dead workers, exceptions and values that are not
finite numbers all raise. What a function returns beside its reward goes into the episode's record. This guards against
accidents (endless loops, memory, ``os._exit``); it is not a sandbox against an attacker.
"""

import asyncio
import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from areal_lite.api.failure import FailureKind, attributed_to
from areal_lite.api.reward_value import Reward, read_reward, reward_of
from areal_lite.config.dotted_path import load_object
from areal_lite.errors import ConfigError
from areal_lite.processes.call_pool import shared_pool
from areal_lite.processes.child_process import PickledObject, pickled_object


class AsyncRewardWrapper:
    """Makes a reward function awaitable: ``await wrapper(prompt, completion, prompt_ids, completion_ids, **row)``.

    A plain function runs in one of ``max_workers`` processes that all wrappers with that number share;
    an ``async def`` function (a judge behind HTTP, say) is awaited on the caller's loop, under the same limit.

    A function returns a number, a list or array with one for each token of the answer, or a dict with either as
    ``score`` (or ``reward``). Numbers and texts beside it in the dict go into the dump of the running episode, and the
    means of the numbers into the run's metrics as ``rollout/reward_extra/NAME``. In a run with ``rollout.rewards.key``
    it returns a dict with that name in place of ``score``.

    Args:
        reward_fn: A function at module level, a picklable callable, or a dotted path to one.
        timeout_seconds: Limit on one call, from when a worker that loaded the function gets it; waiting is not counted.
        max_workers: Processes; None takes half the cores, at least 2.
        max_retries: Retries after a failure of any kind.
        in_process: Call the function on the event loop: for cheap, pure functions, also lambdas. It cannot time out.

    Raises:
        ConfigError: If an argument is out of range, or the function cannot be sent to a worker.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        timeout_seconds: float = 15,
        max_workers: int | None = None,
        max_retries: int = 0,
        *,
        in_process: bool = False,
    ) -> None:
        if not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds is {timeout_seconds!r}: it must be above 0")
        if max_retries < 0:
            raise ConfigError(f"max_retries is {max_retries}: it must be 0 or more")
        if max_workers is not None and max_workers < 1:
            raise ConfigError(f"max_workers is {max_workers}: it must be 1 or more, or None")
        function = load_object(reward_fn, where="reward_fn") if isinstance(reward_fn, str) else reward_fn
        if not callable(function):
            raise ConfigError(f"reward_fn is {function!r}: it must be callable")
        self._function = function
        self._name = getattr(function, "__qualname__", repr(function))
        self._timeout_s = float(timeout_seconds)
        self._max_workers = max_workers or max(2, (os.cpu_count() or 2) // 2)
        self._max_retries = max_retries
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self._sent: PickledObject | None = None
        if not self._is_async and not in_process:
            hint = (
                "A lambda or a nested function has no importable name: define it with def at the top of a module, or "
                "pass in_process=True if it is cheap and pure"
            )
            self._sent = pickled_object(partial(reward_of, function), name=f"reward_fn {self._name}", hint=hint)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the reward: a float, or a list of floats if there is one for each token.

        Raises:
            TimeoutError: After ``timeout_seconds``; the worker is killed.
            ValueError: If the function returned anything else, a number that is not finite, or another number of
                rewards than ``completion_ids``, the fourth argument, has tokens.
            RuntimeError: If the worker died.
            Exception: What the function raised, with its text and the worker's traceback as a note.
        """
        for _ in range(self._max_retries):
            try:
                return await self._checked(args, kwargs)
            except Exception:
                continue  # the last try's error is the one that counts
        with attributed_to(FailureKind.REWARD):
            return await self._checked(args, kwargs)

    async def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | list[float]:
        from areal_lite.api import episode_context  # which loads numpy

        key = episode_context.current().reward_key
        value, facts = await self._call(key, args, kwargs)
        tokens = args[3] if len(args) > 3 else kwargs.get("completion_ids", ())
        if isinstance(value, list) and len(value) != len(tokens):
            raise ValueError(
                f"reward {self._name} is a list of {len(value)} for {len(tokens)} completion_ids: it must be a finite "
                "number, or one for each of them"
            )
        episode_context.record_reward_facts(facts)
        if key is not None:
            episode_context.record_counts({f"reward/{key}": sum(value) if isinstance(value, list) else value})
        return value

    async def _call(self, key: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reward:
        if self._is_async:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    return read_reward(await self._function(*args, **kwargs), key)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise TimeoutError(f"reward {self._name} gave no answer in {self._timeout_s:g} s") from None
        if self._sent is None:
            return read_reward(self._function(*args, **kwargs), key)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 // self._max_workers
        pool = shared_pool(self._max_workers, max(4 << 30, memory))
        return read_reward(await pool.call(self._sent, (key, *args), kwargs, timeout_s=self._timeout_s), key)
