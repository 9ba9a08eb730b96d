"""Messages between the run and a child: whole and in order, bounded, and plain data on the way back."""

from __future__ import annotations

import asyncio
import io
import socket
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.processes.call_pool import receive
from areal_lite.processes.channel import (
    BrokenMessageError,
    MessageSplitter,
    decode_reply,
    encode_reply,
    framed,
    read_message,
)
from tests.rollout.scripted import on_a_loop


@given(st.lists(st.binary(max_size=30)), st.lists(st.integers(0, 400)))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(sent: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, sent))
    splitter = MessageSplitter(max_bytes=30)
    edges = [0, *sorted(cuts), len(stream)]
    parts = [stream[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert [bytes(body) for part in parts for body in splitter.feed(part)] == sent
    assert not splitter._buffer
    reader = io.BytesIO(stream)
    assert [read_message(reader, max_bytes=30) for _ in sent] == sent
    assert read_message(reader) is None


def test_a_message_above_the_bound_or_cut_off_is_refused() -> None:
    message = framed(bytes(31))
    for stream in (message, message[:-1], message[:4]):
        with pytest.raises(BrokenMessageError):
            read_message(io.BytesIO(stream), max_bytes=30)
    with pytest.raises(BrokenMessageError, match="31 bytes, above the limit of 30"):
        list(MessageSplitter(max_bytes=30).feed(message[:8]))


@pytest.mark.parametrize("reply", [framed(bytes(300_000)), framed(b"")], ids=["long", "empty"])
@on_a_loop
async def test_a_reply_is_received_whole_and_one_above_the_bound_is_refused(reply: bytes) -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        sending = loop.create_task(loop.sock_sendall(theirs, reply))
        assert framed(await receive(loop, ours)) == reply
        await sending
        await loop.sock_sendall(theirs, framed(bytes(31)))
        with pytest.raises(BrokenMessageError, match="above the limit"):
            await receive(loop, ours, max_bytes=30)
        theirs.close()
        with pytest.raises(BrokenMessageError, match="ended"):
            await receive(loop, ours)


def test_a_reply_is_plain_data_and_bytes() -> None:
    head = {"score": np.float32(0.5), "text": "x\ud800", "odd": object, "all": (1, None, True, float("inf"))}
    columns = [b"", b"abc", np.arange(3, dtype=np.int32).tobytes()]
    body = memoryview(encode_reply(head, columns))
    arrived, parts = decode_reply(body)
    assert arrived == {"score": 0.5, "text": "x\ud800", "odd": repr(object), "all": [1, None, True, float("inf")]}
    assert [bytes(part) for part in parts] == columns


@given(st.binary(max_size=40))
def test_what_is_no_reply_is_one_error(noise: bytes) -> None:
    for body in (noise, framed(noise), framed(b"[" * 100_000)):
        with pytest.raises(BrokenMessageError):
            decode_reply(body)


def test_the_children_of_a_pool_start_without_what_is_slow_to_load() -> None:
    code = (
        "import sys, areal_lite.processes.call_child, areal_lite.api.reward_value; "
        "print(*{'asyncio', 'numpy', 'pydantic', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
