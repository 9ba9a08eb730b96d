"""AReaL's cache of interactions, and workflows that call a model past the engine and record no log-probs."""

from __future__ import annotations
from typing import Any
import pytest
import torch
from areal_lite.experimental.openai.cache import InteractionCache
from areal_lite.experimental.openai.types import InteractionWithTokenLogpReward
from openai import AsyncOpenAI
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.io_struct import ModelResponse
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.stub_server import StubServer, StubThread


def interaction(prompt: list[int], answer: list[int], version: int = 3) -> Any:
    """An interaction as AReaL's controllers make it; a version of -1 marks log-probs that were not recorded."""
    logprob = -0.5 if version >= 0 else 0.0
    response = ModelResponse(
        input_tokens=prompt,
        output_tokens=answer,
        output_logprobs=[logprob] * len(answer),
        output_versions=[version] * len(answer),
    )
    return InteractionWithTokenLogpReward(
        model_response=response, messages=[], output_message_list=[], chat_template_type="individual"
    )


def conversation(version: int = 3) -> Any:
    """Two turns, the second once more from the first, and a prompt of its own."""
    cache = InteractionCache()
    cache["a"] = interaction([1, 2], [3], version)
    cache["b"] = interaction([1, 2, 3, 4], [5, 6], version)
    cache["c"] = interaction([1, 2, 3, 7], [8], version)
    cache["d"] = interaction([9], [8], version)
    return cache


def test_a_conversation_is_found_by_its_tokens_and_trains_each_once() -> None:
    cache = conversation()
    for reward, name in enumerate("abcd"):
        cache.set_reward(name, reward)
    assert [each.parent for each in cache.values()] == [None, cache["a"], cache["a"], None]
    assert cache.total_reward == 6
    whole = cache.export_interactions("concat")
    masks = {name: each.columns()["loss_mask"].astype(int).tolist() for name, each in whole.items()}
    assert masks == {"b": [0, 0, 1, 0, 1, 1], "c": [0, 0, 0, 0, 1], "d": [0, 1]}
    some = conversation()
    some.set_last_reward(1.0)
    assert list(some.export_interactions("individual")) == ["d"]
    alone = cache.export_interactions("individual")
    assert alone.keys() == cache.keys() and alone["b"].columns()["loss_mask"].sum() == 2


def test_rewards_are_discounted_once_and_one_that_is_missing_counts_as_0() -> None:
    cache = conversation()
    with pytest.raises(KeyError):
        cache.set_reward("e", 1.0)
    with pytest.raises(ValueError, match="finite"):
        cache.set_last_reward(float("nan"))
    cache.set_reward("a", 1.0)
    cache.set_last_reward(8.0)
    assert cache.last_interaction_id == "d"
    exported = cache.export_interactions("individual", reward_discount=0.5)
    assert [each.reward for each in exported.values()] == [2.0, 2.0, 4.0, 8.0]
    assert {each.episode_reward for each in exported.values()} == {2.0}
    assert cache.export_interactions("individual", reward_discount=0.5)["a"].reward == 2.0
    with pytest.raises(RuntimeError, match="twice"):
        cache.apply_reward_discount(0.5)
    with pytest.raises(ValueError, match="no interaction"):
        InteractionCache().set_last_reward(1.0)


@pytest.mark.parametrize("as_tensors", [True, False])
def test_a_log_prob_that_was_not_recorded_is_none(as_tensors: bool) -> None:
    for version, recorded in ((3, True), (-1, False)):
        cache = conversation(version)
        cache.set_last_reward(1.0)
        returned = cache["d"].to_tensor_dict() if as_tensors else {"d": cache["d"]}
        (sequence,) = trajectory_of(returned, []).sequences
        assert (sequence.logprobs is not None) == (sequence.versions is not None) == recorded
    certain = interaction([9], [8, 7])
    certain.model_response.output_logprobs, certain.reward = [0.0, 0.0], 1.0
    (sequence,) = trajectory_of({"d": certain}, []).sequences
    assert sequence.logprobs is not None  # a version says that the engine sampled them, with certainty


class PastTheEngine(RolloutWorkflow):
    """The shape of AReaL's ScaffoldingWorkflow: it asks the server itself."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Ask once, and mark what is not known."""
        address = engine.addresses[0]  # type: ignore[attr-defined]
        async with AsyncOpenAI(base_url=f"http://{address}/v1", api_key="EMPTY", max_retries=0) as client:
            await client.models.list()
        cache = InteractionCache()
        cache["a"] = interaction([5, 6], [7, 8], -1)
        cache.set_last_reward(1.0)
        return cache.export_interactions("individual")["a"].to_tensor_dict()


def test_a_workflow_that_asks_the_server_past_the_engine_runs() -> None:
    with StubThread(StubServer()) as stub:
        config = InferenceEngineConfig(backend="sglang", addresses=[stub.address])
        with RemoteInfEngine(config) as engine:
            assert engine.addresses == [stub.address]
            (group,) = engine.rollout_batch([{}], PastTheEngine())
    assert group.error is None and group.rewards == [1.0]
    assert group.sequences[0].logprobs is None
