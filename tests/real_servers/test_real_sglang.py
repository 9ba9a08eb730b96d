"""The engine and the agents' service against a real SGLang; `make test-servers` runs it."""

from __future__ import annotations
import pytest
from tests.real_servers.agent_contract import AgentContract
from tests.real_servers.contract import RealServerContract


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestSGLang(AgentContract, RealServerContract):
    backend = "sglang"
    longest_prompt = 2041
    logprobs_follow_filters = False
    broken_promises = {"test_a_seed_repeats_an_answer": "seeds need --enable-deterministic-inference, and that a GPU"}
