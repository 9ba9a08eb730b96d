"""The wire formats of SGLang (the embedded server's too) and vLLM, as pure functions of requests and answers.

Promises that a reply which cannot be trusted is refused, and that nothing else knows a server's field names. Imports
only records of the weights beside what is below ``servers``; called by client, weights and programs. Read dialect
(what goes in and comes out), sglang, then reply_reader.
"""

from typing import Literal
from areal_lite.servers.dialects.sglang import SGLang
from areal_lite.servers.dialects.vllm import VLLM

Dialect = SGLang | VLLM


def dialect_of(backend: Literal["sglang", "vllm", "embedded"]) -> Dialect:
    """Return the dialect a backend speaks; the embedded server speaks SGLang's."""
    return VLLM() if backend == "vllm" else SGLang(embedded=backend == "embedded")
