"""The trainer's end of weight broadcasts, without a server: buckets, backends, and groups that end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_lite.servers.weights import broadcaster as weight_broadcast
from areal_lite.servers.weights.broadcaster import BroadcastGroup, WeightBroadcaster
from areal_lite.servers.weights.published_weights import WeightBucket


@pytest.fixture
def sender() -> Iterator[WeightBroadcaster]:
    made = WeightBroadcaster(torch.nn.ParameterDict({name: torch.zeros(2) for name in "abcde"}), dtype=torch.float32)
    yield made
    made.close()


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


def test_closed_groups_are_forgotten(sender: WeightBroadcaster) -> None:
    first, second = opened(sender), opened(sender)
    assert first.master_port != second.master_port
    first.close()
    third = opened(sender)
    assert sender._groups == [second, third]


def test_closing_ends_all_groups(sender: WeightBroadcaster) -> None:
    groups = opened(sender), opened(sender)
    sender.close()
    assert all(group.closed for group in groups)


def test_a_server_that_does_not_join_in_time_is_an_error(
    group: BroadcastGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_broadcast, "JOIN_TIMEOUT_S", 0.0)
    with pytest.raises(OSError, match="the server did not join the process group in 0 s"):
        group.join()
    assert not group._busy.locked()


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
    with pytest.raises(OSError, match="the broadcast failed: gone$"):
        group.send(bucket)
    assert group.closed
    assert group._store is None
    with pytest.raises(OSError, match="the process group was closed"):
        group.send(bucket)
    assert len(sent) == 1


def test_closing_lets_go_of_the_store_at_once_or_when_the_last_thread_has_ended(sender: WeightBroadcaster) -> None:
    idle, busy = opened(sender), opened(sender)
    idle.close()
    with busy._busy:  # as in a thread that has just looked whether the group is closed
        busy.close()
        assert busy._store is not None
    busy.wait_until_idle()
    for group in (idle, busy):
        assert group._store is None
        assert not group._busy.locked()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_closing_aborts_what_nccl_has_begun(group: BroadcastGroup, backend: str) -> None:
    aborted = threading.Event()
    group.backend, group._group = backend, SimpleNamespace(abort=aborted.set)
    group.close()
    assert aborted.is_set() == (backend == "nccl")
    group.close()  # there is nothing left to abort
