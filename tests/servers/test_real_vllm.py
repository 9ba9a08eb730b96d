"""The engine against a running vLLM.

Start one in float32 with a window of 2048 tokens and the flags that weight updates need (``--dtype float32
--max-model-len 2048 --enable-scale-out --logprobs-mode processed_logprobs --worker-extension-cls ...``,
VLLM_SERVER_DEV_MODE=1), set AREAL_LITE_VLLM_ADDRESS to its host:port and AREAL_LITE_SERVER_MODEL to the
model's folder, which it must be able to read, then ``pytest -m slow tests/servers``.
"""

from __future__ import annotations

import pytest

from tests.servers.contract import RealServerContract


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestVLLM(RealServerContract):
    backend = "vllm"
    longest_prompt = 2047
    logprobs_follow_filters = True
