"""Environment variables of an episode: ``os.environ`` shows them to the episode's own code only.

SDKs read their address and key from the environment when a client is made without arguments. Many episodes share the
process, so each sees its own values through a contextvar. A subprocess gets them only with ``env=`` given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType

_variables: ContextVar[Mapping[str, str]] = ContextVar("areal_lite_environ", default=MappingProxyType({}))


class EpisodeEnviron(os._Environ[str]):
    """``os.environ`` with the variables of the running episode on top; writes go to the process."""

    def __getitem__(self, key: str) -> str:
        variables = _variables.get()
        return variables[key] if key in variables else super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return key in _variables.get() or super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        own = _variables.get()
        yield from own
        yield from (key for key in super().__iter__() if key not in own)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def show(variables: Mapping[str, str]) -> None:
    """Show ``variables`` to the code that runs in this context and in tasks it starts."""
    if type(os.environ) is not EpisodeEnviron:
        os.environ.__class__ = EpisodeEnviron  # keeps the object: others hold references to it
    _variables.set(variables)
