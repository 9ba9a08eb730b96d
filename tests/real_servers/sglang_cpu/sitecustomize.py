"""Lets SGLang run on a torch without CUDA: with torchvision from PyPI, which is built for CUDA, and with adapters.

The C extension of torchvision does not load there, so the two operators that its Python part registers against are
declared here. SGLang's adapters ask for pinned memory, which such a torch refuses, so they get ordinary memory. Python
imports this file at startup in every process whose PYTHONPATH has this folder.
"""

from __future__ import annotations
import sys
from typing import Any


class DeclareOperators:
    """Declares the operators before the first import of torchvision; finds no module itself."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


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


sys.meta_path.insert(0, UnpinMemory())  # type: ignore[arg-type]
sys.meta_path.insert(0, DeclareOperators())  # type: ignore[arg-type]
