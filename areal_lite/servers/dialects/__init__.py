"""The wire formats of SGLang (the embedded server's too) and vLLM, as pure functions of requests and answers.

Read dialect (what goes in and comes out), then sglang. Nothing else knows a server's field names.
"""

from __future__ import annotations

from typing import Literal

from areal_lite.servers.dialects.sglang import SGLang
from areal_lite.servers.dialects.vllm import VLLM

Dialect = SGLang | VLLM


def dialect_of(backend: Literal["sglang", "vllm", "embedded"]) -> Dialect:
    """Return the dialect a backend speaks; the embedded server speaks SGLang's."""
    return VLLM() if backend == "vllm" else SGLang(embedded=backend == "embedded")
