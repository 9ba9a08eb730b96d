"""Lets SGLang import torchvision from PyPI, which is built for CUDA, beside a torch without CUDA.

Its C extension does not load there, so the two operators that its Python part registers against are declared here.
Python imports this file at startup in every process whose PYTHONPATH has this folder.
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


sys.meta_path.insert(0, DeclareOperators())  # type: ignore[arg-type]
