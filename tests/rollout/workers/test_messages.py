"""An episode of a worker arrives in the run as it ended, without an object of its process."""

from __future__ import annotations
import math
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.api import GenerationHyperparameters
from areal_lite.api.episode_context import Episode
from areal_lite.api.image_span import ImageSpan
from areal_lite.api.io_struct import ModelRequest
from areal_lite.api.trajectory import EpisodeStatus, TokenSequence, Trajectory
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.processes.channel import BrokenMessageError, decode_reply, encode_reply
from areal_lite.rollout.workers.messages import PromptPlace, pack_call, pack_end, read_end, read_report
from tests.api.test_trajectory import check_paths
from tests.api.test_turn_tree import as_interactions, as_rows, conversation_ids, conversations, sequences


@given(data=st.data(), by_rows=st.booleans(), known=st.booleans())
def test_a_trajectory_from_another_process_has_the_same_turns(data: st.DataObject, by_rows: bool, known: bool) -> None:
    calls, paths = data.draw(conversations())
    wanted = data.draw(sequences(paths))
    trajectory = trajectory_of((as_rows if by_rows else as_interactions)(calls, wanted), calls)
    episode = Episode(trajectory=trajectory, counts={"forks": 2.0}, scalars=[("rollout/number", math.inf)])
    end, columns = pack_end(False, None, [episode])
    was_stopped, failure, (reply,) = read_end(*decode_reply(encode_reply(end, columns)))
    assert (was_stopped, failure, reply.records["scalars"]) == (False, None, episode.scalars)
    if not known:  # a workflow made a response of its own
        reply = reply._replace(chains=[[("another", place) for place, _ in enumerate(c)] for c in reply.chains])
    arrived = reply.trajectory
    assert arrived is not None
    reply.link(arrived, calls)
    check_paths(arrived)
    assert (arrived.status, arrived.reward) == (trajectory.status, trajectory.reward)
    assert [*conversation_ids(arrived)] == [*conversation_ids(trajectory)]
    assert [sequence.path for sequence in arrived.sequences] == [sequence.path for sequence in trajectory.sequences]
    for one, other in zip(arrived.turns, trajectory.turns, strict=True):
        assert (one.ids.tolist(), one.loss_mask.tolist()) == (other.ids.tolist(), other.loss_mask.tolist())
    for sequence in arrived.sequences:
        if sequence.loss_mask.any():
            assert any(np.shares_memory(arrived.turns[place].loss_mask, sequence.loss_mask) for place in sequence.path)


def test_what_a_sequence_knows_of_its_episodes_reward_arrives() -> None:
    columns = {"input_ids": np.arange(2), "loss_mask": np.array([False, True])}
    sequences = [TokenSequence(**columns, reward=0.5, episode_reward=whole) for whole in (0.75, None)]
    trajectory = Trajectory(status=EpisodeStatus.ACCEPTED, sequences=sequences)
    end, arrays = pack_end(False, None, [Episode(trajectory=trajectory)])
    _, _, (reply,) = read_end(*decode_reply(encode_reply(end, arrays)))
    assert reply.trajectory is not None
    assert [(s.reward, s.episode_reward) for s in reply.trajectory.sequences] == [(0.5, 0.75), (0.5, None)]


def test_images_of_a_sequence_arrive_as_spans() -> None:
    images = (ImageSpan(1, 2, "a" * 64, (1, 2, 4)),)
    columns = {"input_ids": np.arange(4), "loss_mask": np.array([False] * 3 + [True])}
    trajectory = Trajectory(status=EpisodeStatus.ACCEPTED, sequences=[TokenSequence(**columns, images=images)])
    end, arrays = pack_end(False, None, [Episode(trajectory=trajectory)])
    _, _, (reply,) = read_end(*decode_reply(encode_reply(end, arrays)))
    assert reply.trajectory is not None
    (arrived,) = reply.trajectory.sequences
    assert (arrived.images, type(arrived.images[0])) == (images, ImageSpan)


def arrived_extras(extras: dict[str, Any]) -> dict[str, Any]:
    trajectory = Trajectory(status=EpisodeStatus.ACCEPTED, extras=extras)
    end, columns = pack_end(False, None, [Episode(trajectory=trajectory)])
    _, _, (reply,) = read_end(*decode_reply(encode_reply(end, columns)))
    assert reply.trajectory is not None
    return reply.trajectory.extras


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        np.arange(6, dtype=np.float16).reshape(3, 2),
        np.zeros((0, 2)),
    ],
)
def test_tensors_and_arrays_beside_tokens_arrive_as_they_were(value: Any) -> None:
    (arrived,) = arrived_extras({"multi_modal_input": [{"pixel_values": value}]})["multi_modal_input"]
    back = arrived["pixel_values"]
    assert (type(back), back.dtype, back.shape) == (type(value), value.dtype, value.shape)
    assert back.tolist() == value.tolist()


def test_plain_values_beside_tokens_keep_their_types() -> None:
    extras = {"a": [1, (2.5, None), {"b": b"c", 3: True}], "text": "x", "number": np.int64(4)}
    assert arrived_extras(extras) == {"a": [1, (2.5, None), {"b": b"c", 3: True}], "text": "x", "number": 4}
    for value in (object(), {1, 2}, np.array([object()])):
        with pytest.raises(TypeError, match="which a worker cannot send: return tensors.*rollout.workers: 1"):
            arrived_extras({"value": value})


@pytest.mark.parametrize("place", [None, (1, 3, 0)])
def test_a_call_arrives_with_its_sampling_parameters(place: PromptPlace | None) -> None:
    gconfig = GenerationHyperparameters(logit_bias={3: 1.0}, stop=["\n"], top_k=5)
    call = ModelRequest(
        input_ids=[], gconfig=gconfig, rid="rid", metadata={"agent": "main"}, on_tokens=lambda *_: None, top_logprobs=2,
        images=(ImageSpan(1, 2, "a" * 64, (1, 2, 4)),),
    )  # fmt: skip
    plain, columns = pack_call(call, [5, 6, 7], place)
    body = encode_reply(["generate", 1, None, 0, plain], columns)
    *where, arrived, streams, place_there = read_report(body)
    assert where == ["generate", 1, None, 0]
    assert arrived == replace(call, input_ids=[5, 6, 7], on_tokens=None)
    assert streams and place_there == (place and [*place])


def test_a_log_record_of_a_worker_is_its_text_and_formats_nothing() -> None:
    record = {"name": "x", "levelno": 30, "msg": "%1000000000d", "args": [1], "exc_info": [1, 2, 3]}
    _, read = read_report(encode_reply(["log", record]))
    assert (read.getMessage(), read.args, read.exc_info) == ("%1000000000d", None, None)


def test_a_report_that_is_no_message_is_refused() -> None:
    with pytest.raises(BrokenMessageError):
        read_report(b"\x80\x05N.")
