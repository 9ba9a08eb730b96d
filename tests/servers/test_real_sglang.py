"""The engine against a running SGLang.

Start one in float32 with a window of 2048 tokens on a model of its starting weights (``--dtype float32
--context-length 2048``), set AREAL_LITE_SGLANG_ADDRESS to its host:port and AREAL_LITE_SERVER_MODEL to
the model's folder, which it must be able to read, then ``pytest -m slow tests/servers``.
"""

from __future__ import annotations

import pytest

from tests.servers.contract import RealServerContract


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestSGLang(RealServerContract):
    backend = "sglang"
    longest_prompt = 2041
    logprobs_follow_filters = False
