"""How training uses the machine: memory of process and device, and the measured peak of its operations."""

import functools
import resource
import time
from pathlib import Path
import torch

_STATM = Path("/proc/self/statm")


def resident_gb() -> float:
    """Return the memory of this process; without /proc its peak."""
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9


def memory_metrics() -> dict[str, float]:
    """Return ``rss_gb``, and on a GPU ``device_gb`` and its peak since the last call."""
    metrics = {"rss_gb": resident_gb()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        metrics |= {
            "device_gb": torch.cuda.memory_allocated() / 1e9,
            "device_peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        }
        torch.cuda.reset_peak_memory_stats()
    return metrics


@functools.cache
@torch.no_grad()
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of the best of several matrix products in ``dtype``."""
    size, repeats = (8192, 10) if device.type == "cuda" else (512, 3)
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(repeats):
            left @ right
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 * repeats / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
