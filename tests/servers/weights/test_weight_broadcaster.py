"""The trainer's end of weight broadcasts, without a server: buckets, backends, and groups that end."""

from __future__ import annotations
import gc
import queue
import socket
import threading
from types import SimpleNamespace
from typing import Any
import pytest
import torch
from areal_lite.servers.weights import broadcaster as weight_broadcast
from areal_lite.servers.weights.broadcaster import BroadcastGroup, WeightBroadcaster
from areal_lite.servers.weights.published_weights import WeightBucket


@pytest.fixture
def sender() -> WeightBroadcaster:
    return WeightBroadcaster(torch.nn.ParameterDict({name: torch.zeros(2) for name in "abcde"}), dtype=torch.float32)


@pytest.fixture
def group(sender: WeightBroadcaster) -> BroadcastGroup:
    return opened(sender)


def opened(sender: WeightBroadcaster) -> BroadcastGroup:
    return sender.open_group("127.0.0.1", num_ranks=1, device="cpu")


@pytest.mark.parametrize(("most", "names"), [(16, ["ab", "cd", "e"]), (15, [*"abcde"])])
def test_a_bucket_is_as_large_as_allowed_and_no_larger(
    sender: WeightBroadcaster, most: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_broadcast, "MAX_BUCKET_BYTES", most)
    assert ["".join(bucket.tensors) for bucket in sender.publish(1).buckets] == names


def test_training_on_does_not_change_what_was_published(sender: WeightBroadcaster) -> None:
    (bucket,) = sender.publish(1).buckets
    with torch.no_grad():
        for parameter in sender._model.parameters():
            parameter += 1
    assert not any(bool(tensor.any()) for tensor in bucket.tensors.values())


@pytest.mark.parametrize(
    ("own", "device", "backend"),
    [
        ("cuda", "cuda", "nccl"),
        ("cuda", None, "nccl"),
        ("cuda", "cpu", "gloo"),
        ("cpu", "cuda", "gloo"),
        ("cpu", None, "gloo"),
    ],
)
def test_weights_go_from_gpu_to_gpu_where_both_ends_have_one(
    sender: WeightBroadcaster, own: str, device: str | None, backend: str
) -> None:
    sender._device = torch.device(own)
    group = sender.open_group("127.0.0.1", num_ranks=2, device=device)
    assert (group.backend, group._device.type) == (backend, "cuda" if backend == "nccl" else "cpu")
    assert (group.master_address, group.size) == ("127.0.0.1", 3)


def test_groups_meet_at_ports_of_their_own(sender: WeightBroadcaster) -> None:
    first, second = opened(sender), opened(sender)
    assert first.master_port != second.master_port
    first.close()
    assert first.closed and not second.closed


def test_a_server_that_does_not_join_in_time_is_an_error(
    group: BroadcastGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_broadcast, "JOIN_TIMEOUT_S", 0.0)
    with pytest.raises(OSError, match="the server did not join the process group in 0 s"):
        group.join()


def test_a_group_that_cannot_be_joined_is_an_error(group: BroadcastGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no route\nfrom here")

    monkeypatch.setattr(weight_broadcast, "join_group", fails)
    group._store.set("a key", "of the server")
    with pytest.raises(OSError, match="joining the process group failed: no route$"):
        group.join()


def test_a_group_whose_broadcast_failed_is_closed_and_sends_no_more(
    group: BroadcastGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []

    def fails(_: Any, tensor: torch.Tensor) -> None:
        sent.append(tensor)
        raise RuntimeError("gone\nfor good")

    monkeypatch.setattr(weight_broadcast, "broadcast", fails)
    bucket = WeightBucket({"a": torch.zeros(1), "b": torch.zeros(1)})
    group._group = object()
    with pytest.raises(OSError, match="the broadcast failed: gone$"):
        group.send(bucket)
    assert group.closed
    assert group._store is None
    with pytest.raises(OSError, match="the process group was closed"):
        group.send(bucket)
    assert len(sent) == 1


def test_closing_ends_a_join_and_frees_the_port(group: BroadcastGroup) -> None:
    looked, errors = threading.Event(), queue.SimpleQueue[OSError]()

    class Store:
        """Tells that a thread looks whether the server has come."""

        def __init__(self, store: Any) -> None:
            self.store = store

        def num_keys(self) -> int:
            looked.set()
            return int(self.store.num_keys())

    def join() -> None:
        try:
            group.join()
        except OSError as error:
            errors.put(error)

    group._store = Store(group._store)
    thread = threading.Thread(target=join)
    thread.start()
    assert looked.wait(10)
    group.close()
    thread.join(10)
    assert str(errors.get_nowait()) == "the process group was closed"
    gc.collect()
    socket.create_server(("127.0.0.1", group.master_port)).close()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_closing_aborts_what_nccl_has_begun(group: BroadcastGroup, backend: str) -> None:
    aborted = threading.Event()
    group.backend, group._group = backend, SimpleNamespace(abort=aborted.set)
    group.close()
    assert aborted.is_set() == (backend == "nccl")
    group.close()  # there is nothing left to abort
