"""The wire dialects of inference servers: pure request building and reply parsing."""

from __future__ import annotations

from typing import Literal

from areal_lite.infra.backends.dialect import Dialect
from areal_lite.infra.backends.sglang import SGLang
from areal_lite.infra.backends.vllm import VLLM


def dialect_of(backend: Literal["sglang", "vllm", "embedded"]) -> Dialect:
    """Return the dialect a backend speaks; the embedded server speaks SGLang's."""
    return VLLM() if backend == "vllm" else SGLang(embedded=backend == "embedded")
