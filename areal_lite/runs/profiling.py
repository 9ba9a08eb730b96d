"""Profiles and memory snapshots of chosen steps; consecutive steps share one trace."""

import gc
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class StepProfiler(ExitStack):
    """Writes ``steps_FIRST-LAST.json`` for Perfetto or chrome://tracing; later ranks add their number. As a context
    manager around all steps, it also ends a trace that is still open: torch crashes a process that exits with one."""

    def __init__(self, steps: Sequence[int], folder: Path) -> None:
        super().__init__()
        self._steps = set(steps)
        self._folder = folder
        self._last = -1

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        if step in self._steps:
            if self._last != step - 1:
                self.enter_context(self._trace(step))
            self._last = step
        continues = False
        try:
            yield
            continues = step + 1 in self._steps
        finally:
            if not continues:
                self.close()

    @contextmanager
    def _trace(self, first: int) -> Iterator[None]:
        from torch.profiler import profile

        trace = profile(record_shapes=True)
        try:
            with trace:
                yield
        finally:
            self._folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self._folder / f"steps_{first}-{self._last}{_of_rank()}.json"))


@dataclass(frozen=True)
class MemorySnapshots:
    """Writes what holds memory at the end of a step; later ranks add their number to the names. ``step_N.json`` has the
    bytes of the process and of its tensors by device, dtype and shape. On a GPU, ``step_N.pickle`` has all allocations
    of the step for https://pytorch.org/memory_viz."""

    steps: Sequence[int]
    folder: Path

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        if step not in self.steps:
            yield
            return
        import orjson
        import torch

        path = self.folder / f"step_{step}{_of_rank()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not torch.cuda.is_available():
            yield
        else:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
            try:
                yield
                torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))  # type: ignore[no-untyped-call]
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        path.write_bytes(orjson.dumps(_memory(), option=orjson.OPT_INDENT_2))


def _memory() -> dict[str, Any]:
    import torch

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sizes, counts = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    storages = set()
    for tensor in gc.get_objects():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        if (place := (tensor.device, storage.data_ptr())) not in storages:  # views share their storage
            storages.add(place)
            kind = (str(tensor.device), str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape)))
            sizes[kind] += storage.nbytes()
            counts[kind] += 1
    return {
        "resident_bytes": 1024 * int(status["VmRSS"].split()[0]),
        "peak_resident_bytes": 1024 * int(status["VmHWM"].split()[0]),
        "tensor_bytes": sizes.total(),
        "tensors": [
            {**dict(zip(("device", "dtype", "shape"), kind, strict=True)), "count": counts[kind], "bytes": size}
            for kind, size in sizes.most_common()
        ],
    }


def _of_rank() -> str:
    rank = os.environ.get("RANK", "0")
    return f".rank{rank}" if rank != "0" else ""
