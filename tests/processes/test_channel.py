"""Messages between the run and a child: whole and in order, bounded, and plain data on the way back."""

from __future__ import annotations
import asyncio
import io
import json
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.processes import channel
from areal_lite.processes.call_pool import CallPool, receive
from areal_lite.processes.channel import (
    BrokenMessageError,
    MessageSplitter,
    decode_reply,
    encode_reply,
    framed,
    read_message,
)
from areal_lite.processes.child_process import pickled_object
from tests import fork_server
from tests.rollout.scripted import on_a_loop
from tests.rollout.worker_episodes import RunsCode, sends


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


def test_columns_fill_the_message_and_no_more() -> None:
    for sizes in ([4, -4, 4], [5], [2**62], [-1], [1.0], ["1"], [None]):
        with pytest.raises(BrokenMessageError):
            decode_reply(framed(json.dumps([0, sizes]).encode()) + b"data")


UNPICKLES = {
    "processes/call_child.py": "a child, what the run sends",
    "rollout/workers/worker_process.py": "a child, what the run sends",
    "rollout/dumps/dump_writer.py": "a child that runs no users' code, what the run sends",
    "rollout/dumps/packed_group.py": "a group that this process packed, or the run for the writer of dumps",
    "rollout/workers/worker.py": "a copy of an exception that this process made, to see whether a worker can load it",
}
"""Who unpickles what. Whoever adds a file here says why it is nothing that a process with users' code sent."""
LOADS_ROWS = {"data/rows/loader.py", "data/supervised/tokenized_dataset.py"}
"""Torch and the standard library unpickle what processes that load rows send: the config's code (SECURITY.md)."""


def test_nothing_is_unpickled_but_what_the_run_itself_sent() -> None:
    unpickles, pools = set(), set()
    package = Path(channel.__file__).parents[1]
    for path in package.rglob("*.py"):
        name, text = str(path.relative_to(package)), path.read_text()
        if re.search(r"pickle\.loads?\b|\bUnpickler\(|torch\.load\(|allow_pickle=T|marshal\.|shelve|dill", text):
            unpickles.add(name)
        if re.search(
            r"import multiprocessing|multiprocessing\.connection|ProcessPoolExecutor|DataLoader\[|dist\.\w+_object",
            text,
        ):
            pools.add(name)
    assert (unpickles, pools) == (set(UNPICKLES), LOADS_ROWS)


HOSTILE = {
    "a pickle": (None, "no reply"),
    "no pair": (encode_reply(3), "unpack"),
    "an exception that ends programs": (encode_reply(["error", ["SystemExit", "x", "", None, None]]), "x"),
    "an error without parts": (encode_reply(["error", None]), "NoneType"),
    "an error that is no text": (encode_reply(["error", [{}, "x", "", None, None]]), "str"),
    "columns again and again": (framed(b'[["value", 1], [8, -8, 8]]') + b"12345678", "no reply"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_of_a_child_is_an_error_of_its_call_and_never_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", fork_server.RealPopen)  # a fork has a connection more
    body, error = HOSTILE[name]
    body = pickle.dumps(RunsCode(tmp_path / "mark")) if body is None else body

    async def call() -> None:
        pool = CallPool(1)
        try:
            with pytest.raises(Exception, match=f"{error}|worker process died") as raised:
                await pool.call(pickled_object(sends, name="sends", hint=""), (body,), timeout_s=20)
            assert isinstance(raised.value, Exception)
            if name == "an exception that ends programs":  # an answer like any other: the child is asked again
                return
            assert await pool.call(pickled_object(len, name="len", hint=""), ("abc",), timeout_s=20) == 3
        finally:
            pool.close()

    asyncio.run(call())
    assert not (tmp_path / "mark").exists()


def test_the_children_of_a_pool_start_without_what_is_slow_to_load() -> None:
    code = (
        "import sys, areal_lite.processes.call_child, areal_lite.api.reward_value; "
        "print(*{'asyncio', 'numpy', 'pydantic', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
