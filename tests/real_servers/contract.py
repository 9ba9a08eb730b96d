"""What the engine promises on any real server; a backend's test class adds what differs."""

from __future__ import annotations
import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
import pytest
import torch
from areal_lite.api import (
    EpisodeStatus,
    GenerationHyperparameters,
    InferenceEngine,
    InferenceEngineConfig,
    ModelRequest,
    ModelResponse,
    RolloutWorkflow,
    Trajectory,
)
from areal_lite.api.trajectory import TurnRole
from areal_lite.config.trainer_config import TeacherConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError, ServerError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.client.teacher import Teacher
from areal_lite.servers.weights.broadcaster import BroadcastGroup, WeightBroadcaster
from areal_lite.servers.weights.published_weights import PublishedWeights, WeightBucket, WeightFolder
from tests.real_servers.real_server import CuttableLine, Policy, RealServer, chosen, prompt
from tests.rollout.scripted import tensors_of
from tests.trainer.training_data import sequence

EXACT = 1e-4
ROW = {"question": "Which is the largest number: 3, 71, 20, 9?", "answer": "71"}
AGENT = "workflows.largest_number.LargestNumberAgent"


def generate(engine: RemoteInfEngine, ids: list[int], **sampling: Any) -> ModelResponse:
    return asyncio.run(engine.agenerate(ModelRequest(input_ids=ids, gconfig=GenerationHyperparameters(**sampling))))


def generate_all(engine: RemoteInfEngine, prompts: list[list[int]], **sampling: Any) -> list[ModelResponse]:
    async def run() -> list[ModelResponse]:
        gconfig = GenerationHyperparameters(**sampling)
        requests = [ModelRequest(input_ids=ids, gconfig=gconfig) for ids in prompts]
        return list(await asyncio.gather(*map(engine.agenerate, requests)))

    return asyncio.run(run())


distances: list[float] = []
"""What ``distance`` returned in this test."""


def distance(response: ModelResponse, expected: torch.Tensor) -> float:
    """Return the largest gap between the answer's log-probs and ``expected``."""
    distances.append(float((torch.tensor(response.output_logprobs) - expected).abs().max()))
    return distances[-1]


def update_under_answers(
    engine: RemoteInfEngine,
    server: RealServer,
    policy: Policy,
    perturbed: Policy,
    weights: PublishedWeights,
    *,
    attempts: int,
) -> None:
    """Change the weights to the perturbed ones while three answers run, and check every token and its version."""
    texts = ("Tell me a long story about a fox.", "Explain rain.", "Write about the sea.")
    answers: list[ModelResponse] = []

    def run() -> None:
        prompts = [prompt(server.model, text) for text in texts]
        answers.extend(generate_all(engine, prompts, temperature=0.7, ignore_eos=True, max_new_tokens=160))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(3)
    engine.update_weights(weights)
    assert engine.get_version() == 1
    thread.join()

    for answer in answers:
        assert (answer.output_len, answer.stop_reason) == (160, "length")
        first_new = answer.output_versions.index(1)
        assert 0 < first_new < 160
        assert answer.output_versions == [0] * first_new + [1] * (160 - first_new)
        assert answer.attempts == attempts
        old, new = policy.logprobs(answer, 0.7), perturbed.logprobs(answer, 0.7)
        assert distance(answer, torch.cat([old[:first_new], new[first_new:]])) < EXACT
        assert (old - new).abs().max() > 0.1  # the two checkpoints can be told apart

    fresh = generate(engine, prompt(server.model), temperature=0.7, max_new_tokens=16)
    assert set(fresh.output_versions) == {1}
    assert distance(fresh, perturbed.logprobs(fresh, 0.7)) < EXACT


def answers_of(trajectory: Trajectory) -> list[ModelResponse]:
    """Return the model calls of an episode, as recorded."""
    answers = []
    for turn in trajectory.turns:
        if turn.role is not TurnRole.ASSISTANT:
            continue
        assert turn.logprobs is not None and turn.versions is not None
        given: list[int] = []
        before = turn.parent
        while before is not None:
            given = trajectory.turns[before].ids.tolist() + given
            before = trajectory.turns[before].parent
        answers.append(
            ModelResponse(
                input_tokens=given,
                output_tokens=turn.ids.tolist(),
                output_logprobs=turn.logprobs.tolist(),
                output_versions=turn.versions.tolist(),
            )
        )
    return answers


def answer_of(trajectory: Trajectory) -> ModelResponse:
    """Return the one model call of an episode."""
    (answer,) = answers_of(trajectory)
    return answer


class LongAnswer(RolloutWorkflow):
    """One answer of 160 tokens."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Ask once."""
        gconfig = GenerationHyperparameters(max_new_tokens=160, ignore_eos=True)
        return tensors_of(await engine.agenerate(ModelRequest(input_ids=data["ids"], gconfig=gconfig)))


class RealServerContract:
    """Tests in the order of a server's life; each leaves it on its starting weights."""

    backend: ClassVar[str]
    context_length: ClassVar[int] = 2048
    longest_prompt: ClassVar[int]
    logprobs_follow_filters: ClassVar[bool]
    """Whether log-probs are those after top-p and top-k instead of before."""

    broken_promises: ClassVar[dict[str, str]] = {}
    """Tests that fail on this server, and why."""

    # -- tokens --------------------------------------------------------------------------------

    def test_the_server_reports_its_window(self, engine: RemoteInfEngine) -> None:
        window = engine._client.requests.limits.context_length
        assert window is not None
        assert self.longest_prompt < window <= self.context_length

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_are_the_models_own(
        self, engine: RemoteInfEngine, server: RealServer, policy: Policy, temperature: float
    ) -> None:
        ids = prompt(server.model)
        for response in generate_all(engine, [ids] * 4, temperature=temperature, max_new_tokens=32):
            assert len(response.output_tokens) == len(response.output_logprobs) == len(response.output_versions)
            assert set(response.output_versions) == {0}
            assert response.output_len == 32 or response.stop_reason == "stop"
            assert response.attempts == 1
            assert distance(response, policy.logprobs(response, temperature)) < EXACT

    def test_a_teachers_scores_of_a_group_are_the_models_own(self, server: RealServer, policy: Policy) -> None:
        config = TeacherConfig(addresses=[server.address], backend=self.backend)  # type: ignore[arg-type]
        asked, answers = prompt(server.model), [[504, 3575, 282], [4649, 314, 260, 1029], [9]]
        places = [range(len(asked), len(asked) + len(answer)) for answer in answers]
        group = [sequence(asked + answer, where) for answer, where in zip(answers, places, strict=True)]
        for _ in range(2):  # the second time the prompt is known
            Teacher(config, tokenizer_path=str(server.model), patience_s=10.0).score(group)
            for each in group:
                with torch.no_grad():
                    logits = policy.model(torch.tensor(each.input_ids)[None]).logits[0, len(asked) - 1 : -1]
                assert each.reference_logprobs is not None
                given = torch.tensor(each.reference_logprobs[len(asked) :])
                assert float((given - chosen(logits, each.input_ids[len(asked) :].tolist())).abs().max()) < EXACT

    def test_greedy_takes_the_likeliest_token(
        self, engine: RemoteInfEngine, server: RealServer, policy: Policy
    ) -> None:
        response = generate(engine, prompt(server.model), greedy=True, top_p=0.5, top_k=3, max_new_tokens=24)
        logits = policy.answer_logits(response)
        assert logits.argmax(1).tolist() == response.output_tokens
        assert distance(response, policy.logprobs(response)) < EXACT

    def test_top_p_and_top_k_hold(self, engine: RemoteInfEngine, server: RealServer, policy: Policy) -> None:
        ids = prompt(server.model)
        for sampling in ({"top_k": 3}, {"top_p": 0.5}):
            for response in generate_all(engine, [ids] * 4, max_new_tokens=16, **sampling):
                probabilities = policy.answer_logits(response).softmax(1)
                chosen = probabilities.gather(1, torch.tensor(response.output_tokens)[:, None])
                likelier = probabilities > chosen + 1e-6
                if "top_k" in sampling:
                    assert int(likelier.sum(1).max()) < 3
                    kept = probabilities.topk(3).values.sum(1)
                else:
                    assert float((probabilities * likelier).sum(1).max()) < 0.5
                    ordered = probabilities.sort(descending=True).values
                    kept = (ordered * (ordered.cumsum(1) - ordered < 0.5)).sum(1)
                expected = chosen[:, 0].log() - (kept.log() if self.logprobs_follow_filters else 0.0)
                assert distance(response, expected) < EXACT

    # -- where answers end -----------------------------------------------------------------------

    def test_stop_reasons(self, engine: RemoteInfEngine, server: RealServer) -> None:
        ids, tokenizer = prompt(server.model), load_tokenizer(str(server.model))
        whole = generate(engine, ids, greedy=True, max_new_tokens=24)
        assert (whole.stop_reason, whole.output_len) == ("length", 24)
        text = tokenizer.decode(whole.output_tokens[8:11])

        by_string = generate(engine, ids, greedy=True, max_new_tokens=24, stop=[text])
        assert by_string.stop_reason == "stop"
        assert by_string.output_tokens == whole.output_tokens[:11]

        stop_id = whole.output_tokens[5]
        by_id = generate(engine, ids, greedy=True, max_new_tokens=24, stop_token_ids=[stop_id])
        assert by_id.stop_reason == "stop"
        assert by_id.output_tokens == whole.output_tokens[: whole.output_tokens.index(stop_id) + 1]

        later = generate(engine, ids, greedy=True, max_new_tokens=24, stop_token_ids=[stop_id], min_new_tokens=16)
        assert later.output_len >= 16
        assert stop_id not in later.output_tokens[:16]

    def test_the_end_token_is_kept_with_its_logprob(
        self, engine: RemoteInfEngine, server: RealServer, policy: Policy
    ) -> None:
        ids, tokenizer = prompt(server.model, "Say only: yes"), load_tokenizer(str(server.model))
        response = generate(engine, ids, greedy=True, max_new_tokens=128)
        assert response.stop_reason == "stop"
        assert response.output_tokens[-1] == tokenizer.eos_token_id
        assert distance(response, policy.logprobs(response)) < EXACT
        longer = generate(engine, ids, greedy=True, max_new_tokens=response.output_len + 4, ignore_eos=True)
        assert longer.stop_reason == "length"
        assert longer.output_len == response.output_len + 4

    def test_the_answer_is_cut_to_the_window(self, engine: RemoteInfEngine, server: RealServer) -> None:
        ids = (prompt(server.model) * self.context_length)[: self.longest_prompt - 8]
        response = generate(engine, ids, max_new_tokens=16384, ignore_eos=True)
        assert response.stop_reason == "length"
        assert 8 <= response.output_len <= self.context_length - len(ids)

    def test_a_prompt_beyond_the_window_is_refused(self, engine: RemoteInfEngine, server: RealServer) -> None:
        ids = prompt(server.model) * self.context_length
        with pytest.raises(ConfigError, match="and the window 20"):
            generate(engine, ids[: self.context_length], max_new_tokens=1)
        with pytest.raises(ConfigError):
            generate(engine, ids[: self.longest_prompt + 1], max_new_tokens=1)
        assert generate(engine, ids[:8], max_new_tokens=1).output_len == 1

    # -- weights -------------------------------------------------------------------------------

    @pytest.mark.usefixtures("restored")
    def test_weights_change_under_running_requests(
        self, engine: RemoteInfEngine, server: RealServer, policy: Policy, perturbed: Policy
    ) -> None:
        update_under_answers(engine, server, policy, perturbed, WeightFolder(str(perturbed.path), 1), attempts=2)
        engine.update_weights_from_disk(str(server.model), 2)
        fresh = generate(engine, prompt(server.model), max_new_tokens=16)
        assert set(fresh.output_versions) == {2}
        assert distance(fresh, policy.logprobs(fresh)) < EXACT

    @pytest.mark.usefixtures("restored")
    @pytest.mark.parametrize("pause", ["abort", "keep"])
    def test_broadcast_weights_change_under_running_requests(
        self, config: dict[str, Any], server: RealServer, policy: Policy, perturbed: Policy, pause: Any
    ) -> None:
        sender = WeightBroadcaster(perturbed.model, dtype=torch.float32)
        back = WeightBroadcaster(policy.model, dtype=torch.float32)
        with RemoteInfEngine(InferenceEngineConfig(**config, weight_update_pause=pause)) as engine:
            attempts = 2 if pause == "abort" else 1
            update_under_answers(engine, server, policy, perturbed, sender.publish(1), attempts=attempts)
            engine.update_weights(back.publish(2))
            fresh = generate(engine, prompt(server.model), max_new_tokens=16)
            assert set(fresh.output_versions) == {2}
            assert distance(fresh, policy.logprobs(fresh)) < EXACT

    @pytest.mark.usefixtures("restored")
    def test_a_broadcast_that_breaks_off_is_repeated_over_a_new_group(
        self, engine: RemoteInfEngine, server: RealServer, perturbed: Policy
    ) -> None:
        sender = WeightBroadcaster(perturbed.model, dtype=torch.float32)
        groups: list[BroadcastGroup] = []

        def open_group(*args: Any, **options: Any) -> BroadcastGroup:
            groups.append(WeightBroadcaster.open_group(sender, *args, **options))
            return groups[-1]

        sender.open_group = open_group  # type: ignore[method-assign]
        engine.update_weights(sender.publish(1))
        (group,) = groups
        weights = sender.publish(2)

        def send_half(bucket: WeightBucket) -> None:
            names = list(bucket.tensors)
            type(group).send(group, WeightBucket({name: bucket.tensors[name] for name in names[: len(names) // 2]}))
            group.close()
            raise OSError("the connection was cut")

        group.send = send_half  # type: ignore[method-assign]
        engine.update_weights(weights)
        assert [one.closed for one in groups] == [True, False]
        fresh = generate(engine, prompt(server.model), max_new_tokens=16)
        assert set(fresh.output_versions) == {2}
        assert distance(fresh, perturbed.logprobs(fresh)) < EXACT

    @pytest.mark.usefixtures("restored")
    def test_a_stopped_answer_continues_from_its_tokens_under_new_weights(
        self, config: dict[str, Any], server: RealServer, policy: Policy, perturbed: Policy
    ) -> None:
        source = RolloutDataSourceWithBuffer([{"ids": prompt(server.model)}], SourceSettings(n_samples_per_prompt=3))
        with RemoteInfEngine(InferenceEngineConfig(**config, group_size=3, max_head_offpolicyness=1)) as engine:

            def run() -> None:
                with pytest.raises(ConfigError, match="the source was closed"):
                    engine.prepare_batch(source, LongAnswer)

            thread = threading.Thread(target=run)
            thread.start()
            time.sleep(3)
            engine.close_source(source)
            thread.join()
            begun = [list(sample.tokens) for sample in source.buffer[0]]
            kept = [len(sample.tokens) - sample.spans[0].start for sample in source.buffer[0]]
            assert all(0 < count < 160 for count in kept)
            engine.update_weights_from_disk(str(perturbed.path), 1)
            (result,) = engine.prepare_batch(source, LongAnswer)
        assert result.trajectory is not None
        for trajectory, ids, count in zip(result.trajectories, begun, kept, strict=True):
            answer = answer_of(trajectory)
            assert (answer.input_tokens + answer.output_tokens)[: len(ids)] == ids
            assert answer.output_versions == [0] * count + [1] * (160 - count)
            old, new = policy.logprobs(answer), perturbed.logprobs(answer)
            assert distance(answer, torch.cat([old[:count], new[count:]])) < EXACT

    @pytest.mark.usefixtures("restored")
    def test_a_wrong_checkpoint_path_leaves_the_server_serving(
        self, engine: RemoteInfEngine, server: RealServer, policy: Policy, config: dict[str, Any]
    ) -> None:
        with pytest.raises(ServerError, match="no server took policy version 7"):
            engine.update_weights_from_disk(str(server.model / "absent"), 7)
        assert engine.get_version() == 0
        with RemoteInfEngine(InferenceEngineConfig(**config)) as another:
            response = generate(another, prompt(server.model), max_new_tokens=8)
        assert set(response.output_versions) == {0}
        assert distance(response, policy.logprobs(response)) < EXACT
        engine.update_weights_from_disk(str(server.model), 1)
        assert set(generate(engine, prompt(server.model), max_new_tokens=4).output_versions) == {1}

    # -- episodes ------------------------------------------------------------------------------

    def test_a_group_of_an_agent_trains_on_exact_tokens(
        self, config: dict[str, Any], server: RealServer, policy: Policy
    ) -> None:
        gconfig = GenerationHyperparameters(temperature=0.7, max_new_tokens=24)
        with RemoteInfEngine(InferenceEngineConfig(**config, gconfig=gconfig)) as engine:
            (result,) = engine.rollout_batch([ROW], AGENT, group_size=8)
        assert result.status is EpisodeStatus.ACCEPTED, result.error
        assert [t.status for t in result.trajectories] == [EpisodeStatus.ACCEPTED] * 8
        assert result.trajectory is not None
        assert len(result.rewards) == 8
        tokenizer = load_tokenizer(str(server.model))
        for i, trajectory in enumerate(result.trajectories):
            turn = answer_of(trajectory)
            given = turn.input_len
            assert ROW["question"] in tokenizer.decode(turn.input_tokens)
            whole = turn.input_tokens + turn.output_tokens
            assert result.trajectory["input_ids"][i, : len(whole)].tolist() == whole
            assert int(result.trajectory["loss_mask"][i].sum()) == turn.output_len
            trained = result.trajectory["logprobs"][i, given : len(whole)]
            torch.testing.assert_close(trained, torch.tensor(turn.output_logprobs))
            assert distance(turn, policy.logprobs(turn, 0.7)) < EXACT

    def test_a_server_that_stays_dead_ends_the_run(self, config: dict[str, Any], server: RealServer) -> None:
        gconfig = GenerationHyperparameters(max_new_tokens=400, ignore_eos=True)
        with CuttableLine(server.address) as line:
            config |= {"addresses": [line.address], "gconfig": gconfig, "faults": {"outage_patience_s": 3.0}}
            with RemoteInfEngine(InferenceEngineConfig(**config)) as engine, ThreadPoolExecutor() as pool:
                groups = pool.submit(engine.rollout_batch, [ROW] * 3, AGENT, group_size=2)
                asyncio.run(server.until(busy=True))
                line.cut()
                with pytest.raises(ServerError, match=f"no inference server was healthy for 3 s: .*{line.address}"):
                    groups.result(60)

    def test_an_idle_connection_the_server_closed_is_no_error(
        self, engine: RemoteInfEngine, server: RealServer
    ) -> None:
        ids = prompt(server.model)
        assert generate(engine, ids, max_new_tokens=1).attempts == 1
        time.sleep(6)  # both servers close idle connections after 5 s
        assert generate(engine, ids, max_new_tokens=1).attempts == 1
