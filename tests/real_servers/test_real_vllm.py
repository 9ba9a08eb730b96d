"""The engine and the agents' service against a real vLLM; `make test-servers` runs it."""

from __future__ import annotations
import pytest
from tests.real_servers.agent_contract import AgentContract
from tests.real_servers.contract import RealServerContract


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestVLLM(AgentContract, RealServerContract):
    backend = "vllm"
    longest_prompt = 2047
    logprobs_follow_filters = True
