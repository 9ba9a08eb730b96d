"""Runs inside vLLM's workers (``--worker-extension-cls areal_lite_vllm.WorkerExtension``)."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any
import torch
import torch.distributed

dist: Any = torch.distributed

_JOIN_TIMEOUT_S = 60.0
_RECEIVE_TIMEOUT_S = 600.0

_groups: dict[str, Any] = {}
"""The newest process group, by its name."""
_received: list[Future[list[tuple[str, torch.Tensor]]]] = []
"""Buckets of tensors that are being received."""


class WorkerExtension:
    """Adds methods to vLLM's workers, which return errors instead of killing the engine."""

    def load_checkpoint_dir(self: Any, weights_path: str) -> dict[str, Any]:
        def load() -> None:
            folder = Path(weights_path)
            if not (folder / "config.json").exists() or not any(folder.glob("*.safetensors")):
                raise FileNotFoundError(f"{folder} is not a safetensors checkpoint")
            self.reload_weights(weights_path=weights_path)
            _pack_tied_head(self)

        return _outcome(load)

    def join_weight_group(
        self: Any, name: str, master_address: str, master_port: int, size: int, backend: str
    ) -> dict[str, Any]:
        """Join the trainer's process group; the rank follows from the worker's."""

        def join() -> None:
            _groups.clear()
            timeout = timedelta(seconds=_JOIN_TIMEOUT_S)
            store: Any = dist.TCPStore(master_address, master_port, size, False, timeout)
            for prefix in (name, f"{name}/", "cuda/" if backend == "nccl" else "cpu/"):
                store = dist.PrefixStore(prefix, store)
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                _groups[name] = dist.ProcessGroupNCCL(store, self.rank + 1, size, options)
            else:
                _groups[name] = dist.ProcessGroupGloo(store, self.rank + 1, size, timeout)

        return _outcome(join)

    def receive_weights(
        self: Any, name: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> dict[str, Any]:
        """Begin to receive tensors in a thread, in memory of the CPU; generation goes on."""

        def begin() -> None:
            group = _groups[name]
            device = self.device if isinstance(group, getattr(dist, "ProcessGroupNCCL", ())) else "cpu"
            future: Future[list[tuple[str, torch.Tensor]]] = Future()
            before = _received[-1] if _received else None
            _received.append(future)

            def receive() -> None:
                try:
                    if before is not None:
                        before.result()
                    options = dist.BroadcastOptions()
                    options.rootRank = 0
                    options.timeout = timedelta(seconds=_RECEIVE_TIMEOUT_S)
                    tensors = []
                    for key, dtype, shape in zip(names, dtypes, shapes, strict=True):
                        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                        group.broadcast([tensor], options).wait(options.timeout)
                        tensors.append((key, tensor.cpu()))
                    future.set_result(tensors)
                except Exception as error:
                    future.set_exception(error)

            threading.Thread(target=receive, daemon=True).start()

        return _outcome(begin)

    def load_received_weights(self: Any) -> dict[str, Any]:
        """Load all tensors that were received since :meth:`forget_received_weights`."""

        def load() -> None:
            tensors = [pair for future in _received for pair in future.result(timeout=_RECEIVE_TIMEOUT_S)]
            self.reload_weights(weights_iterator=iter(tensors))
            _pack_tied_head(self)

        outcome = _outcome(load)
        _received.clear()
        return outcome

    def forget_received_weights(self: Any) -> dict[str, Any]:
        return _outcome(_received.clear)


def _pack_tied_head(worker: Any) -> None:
    """Pack the output head again, which reloading leaves as it was on CPUs where it is tied; that of a model which
    reads images is in a part of it."""
    for module in worker.model_runner.get_model().modules():
        head = getattr(module, "lm_head", None)
        if head is not None and getattr(head, "quant_method", None) is not None:
            head.quant_method.process_weights_after_loading(head)


def _outcome(work: Callable[[], object]) -> dict[str, Any]:
    try:
        work()
    except Exception as error:
        return {"success": False, "message": f"{type(error).__name__}: {error}"}
    return {"success": True, "message": ""}
