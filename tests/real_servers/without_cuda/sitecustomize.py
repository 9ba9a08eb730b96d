"""Lets SGLang and vLLM read images on a torch without CUDA, and SGLang load adapters.

The C extension of PyPI's torchvision, which is built for CUDA, does not load there, so the two operators that its
Python part registers against are declared here. SGLang's adapters ask for pinned memory, which such a torch refuses, so
they get ordinary memory. Python imports this file at startup in every process whose PYTHONPATH has this folder.
"""

from __future__ import annotations
import sys
from typing import Any

_SPLIT = "qkvzba_split_reshape_cat_contiguous"


class DeclareOperators:
    """Declares the operators before the first import of torchvision; finds no module itself."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class NameKernels:
    """Gives a name to the kernels that SGLang's vision models look up at their import; finds no module itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "sglang.srt.models.qwen3_5":
            import torch

            for kernel in ("sigmoid_mul", "qk_gemma_rmsnorm", "qk_gemma_rmsnorm_with_gate", _SPLIT):
                setattr(torch.ops.sgl_kernel, f"fused_{kernel}_cpu", None)


class UnpinMemory:
    """Drops ``pin_memory`` before the first import of SGLang's adapters; finds no module itself."""

    done = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "sglang.srt.lora" and not self.done:
            self.done = True
            import torch

            for function in ("tensor", "zeros", "empty"):
                setattr(torch, function, _without_pin_memory(getattr(torch, function)))
            torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def _without_pin_memory(function: Any) -> Any:
    return lambda *args, pin_memory=False, **options: function(*args, **options)


sys.meta_path[:0] = [DeclareOperators(), NameKernels(), UnpinMemory()]  # type: ignore[list-item]
