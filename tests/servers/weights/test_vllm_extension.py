"""What runs in vLLM's workers receives the weights that the trainer broadcasts, in their order."""

from __future__ import annotations
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
import torch
from transformers import AutoModelForCausalLM
from areal_lite.servers.programs.vllm_extension import areal_lite_vllm
from areal_lite.servers.weights import broadcaster
from areal_lite.servers.weights.broadcaster import WeightBroadcaster

SMALL_BUCKET = 1 << 14


class Worker(areal_lite_vllm.WorkerExtension):
    """A worker of vLLM: its rank, and what it loads."""

    rank = 0
    device = "cpu"

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.folders: list[str] = []
        self.packed: list[torch.nn.Module] = []
        self.head: Any = torch.nn.Linear(2, 2)
        self.head.quant_method = SimpleNamespace(process_weights_after_loading=self.packed.append)
        model: Any = torch.nn.ModuleDict({"language_model": torch.nn.ModuleDict({"lm_head": self.head})})
        model["language_model"].embed_tokens = self.head  # tied
        model.lm_head = None
        self.model_runner = SimpleNamespace(get_model=lambda: model)

    def reload_weights(self, *, weights_iterator: Any = (), weights_path: str | None = None) -> None:
        self.loaded = dict(weights_iterator)
        self.folders += [weights_path] if weights_path else []


def described(tensors: dict[str, torch.Tensor]) -> tuple[list[str], list[str], list[list[int]]]:
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    return [*tensors], dtypes, [list(tensor.shape) for tensor in tensors.values()]


def test_a_worker_loads_every_bucket_of_a_broadcast_in_order(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcaster, "MAX_BUCKET_BYTES", SMALL_BUCKET)
    sender = WeightBroadcaster(AutoModelForCausalLM.from_pretrained(tiny_model), dtype=torch.bfloat16)
    worker, group = Worker(), sender.open_group("127.0.0.1", num_ranks=1, device="cpu")
    with ThreadPoolExecutor() as pool:
        where = (group.master_address, group.master_port, group.size, group.backend)
        joined = pool.submit(worker.join_weight_group, group.name, *where)
        group.join()
        assert joined.result(60) == {"success": True, "message": ""}
        for version in (1, 2):
            weights = sender.publish(version)
            assert len(weights.buckets) > 2
            assert worker.forget_received_weights()["success"]
            for bucket in weights.buckets:  # the worker is told of all before the first arrives
                assert worker.receive_weights(group.name, *described(bucket.tensors))["success"]
            for bucket in weights.buckets:
                group.send(bucket)
            assert worker.load_received_weights() == {"success": True, "message": ""}
            sent = {name: tensor for bucket in weights.buckets for name, tensor in bucket.tensors.items()}
            assert worker.loaded.keys() == sent.keys()
            assert all(torch.equal(worker.loaded[name], sent[name]) for name in sent)
            assert worker.packed == [worker.head] * version
    group.close()


def test_a_worker_says_what_failed(tmp_path: Path) -> None:
    worker = Worker()
    outcome = worker.receive_weights("nobody", [], [], [])
    assert outcome == {"success": False, "message": "KeyError: 'nobody'"}
    assert "is not a safetensors checkpoint" in worker.load_checkpoint_dir(str(tmp_path))["message"]
    for name in ("config.json", "model.safetensors"):
        assert not worker.folders
        (tmp_path / name).touch()
        worker.load_checkpoint_dir(str(tmp_path))
    assert worker.folders == [str(tmp_path)]
