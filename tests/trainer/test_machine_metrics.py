from __future__ import annotations
import resource
from pathlib import Path
from types import SimpleNamespace
import pytest
import torch
from areal_lite.trainer import machine_metrics
from areal_lite.trainer.machine_metrics import memory_metrics, peak_flops


def test_the_memory_of_the_process_is_what_the_system_reports() -> None:
    status = Path("/proc/self/status").read_text()
    resident_kib = int(status.partition("VmRSS:")[2].split()[0])
    assert memory_metrics() == pytest.approx({"rss_gb": resident_kib * 1024 / 1e9}, rel=0.1)


def test_without_proc_the_memory_of_the_process_is_its_peak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_metrics, "_STATM", tmp_path / "missing")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert memory_metrics()["rss_gb"] == pytest.approx(peak / 1e9, rel=0.1)


def test_each_call_reports_the_peak_of_the_device_since_the_call_before(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"now": 2e9, "peak": 5e9}
    for name, function in {
        "is_initialized": lambda: True,
        "memory_allocated": lambda: memory["now"],
        "max_memory_allocated": lambda: memory["peak"],
        "reset_peak_memory_stats": lambda: memory.update(peak=memory["now"]),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    measured = [memory_metrics() for _ in range(2)]
    assert [(one["device_gb"], one["device_peak_gb"]) for one in measured] == [(2, 5), (2, 2)]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_peak_is_that_of_the_fastest_round(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """On a GPU a round begins and ends when the work before is done."""
    ones, products, waits = torch.ones, [], []
    times = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0])

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        products.append(2 * left.shape[0] * left.shape[1] * right.shape[1])
        return left

    def clock() -> float:
        waits.append("time")
        return next(times)

    monkeypatch.setattr(torch, "ones", lambda *size, device, dtype: ones(*size, device="meta", dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append("wait"))
    monkeypatch.setattr(machine_metrics, "time", SimpleNamespace(perf_counter=clock))
    peak = peak_flops.__wrapped__(torch.device(kind), torch.float32)
    assert peak == sum(products) / 3 / 2
    assert waits == (["wait", "time"] * 6 if kind == "cuda" else ["time"] * 6)
    assert (sum(products) > 1e13) == (kind == "cuda")  # enough work for the device, and not too much
