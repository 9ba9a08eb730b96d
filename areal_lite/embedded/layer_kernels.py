"""What a layer computes between its matrix products, in C++.

Compiled when the model is loaded, in half a second; nothing is kept on disk. torch's operations pad the tokens of all
slots and read every slot up to the longest one; these read each slot up to its own end, and any number of tokens of it.
They are used in bfloat16 on a CPU where there is a C++ compiler with OpenMP.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_lite.embedded.layer_operations import LayerOperations, Turn
from areal_lite.embedded.slot_cache import SlotLayer

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC"]
_ARRAY, _COUNT, _NUMBER, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "attend": [*[_ARRAY] * 5, _NUMBER, *[_ARRAY] * 4, *[_COUNT] * 3, _NUMBER, _ARRAY, _INT],
    "add_norm": [*[_ARRAY] * 3, _NUMBER, *[_COUNT] * 2, _ARRAY, _INT],
    "gated_silu": [_ARRAY, *[_COUNT] * 2, _ARRAY, _INT],
}


def find_compiler() -> str | None:
    """Return the path of the C++ compiler: ``c++``, or what CXX names."""
    return shutil.which(os.environ.get("CXX", "c++"))


def layer_operations(model: Any) -> LayerOperations:
    """Return the compiled operations if they fit the model and can be compiled, else torch's."""
    config = model.config
    fits = model.dtype == torch.bfloat16 and model.device.type == "cpu" and config.hidden_act == "silu"
    if not fits or "Gemma" in type(model).__name__:
        return LayerOperations(model)
    compiler = find_compiler()
    if compiler is None:
        logger.info("no C++ compiler: decoding takes up to twice as long. Install g++, or set CXX to a compiler.")
        return LayerOperations(model)
    try:
        return CompiledOperations(model, _compiled(compiler, model))
    except (OSError, subprocess.CalledProcessError) as error:
        cause = getattr(error, "stderr", None) or error
        logger.warning("decoding takes up to twice as long: %s cannot compile it: %s", compiler, str(cause)[-500:])
        return LayerOperations(model)


def _compiled(compiler: str, model: Any) -> ctypes.CDLL:
    attention = model.model.layers[0].self_attn
    sizes = [f"-DWIDTH={attention.head_dim}", f"-DGROUPS={attention.num_key_value_groups}"]
    with tempfile.TemporaryDirectory(prefix="areal-lite-") as folder:
        # Linked in a step of its own: -ffast-math there would change the arithmetic of the whole process, and -fopenmp
        # would add a second pool of threads to torch's.
        commands = (
            [*_FLAGS, *sizes, "-c", str(_SOURCE), "-o", "kernels.o"],
            ["-shared", "kernels.o", "-o", "kernels.so"],
        )
        for arguments in commands:
            subprocess.run([compiler, *arguments], cwd=folder, check=True, capture_output=True, text=True)
        library = ctypes.CDLL(str(Path(folder) / "kernels.so"))
    for name, types in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


class CompiledOperations(LayerOperations):
    """Each token is a row of its own, so that a pass needs no padding."""

    pads = False

    def __init__(self, model: Any, library: ctypes.CDLL) -> None:
        super().__init__(model)
        self._library = library

    def attend(self, states: Tensor, attention: Any, cached: SlotLayer, turn: Turn) -> Tensor:
        """See the base class."""
        if not cached.is_initialized:
            key_value = states[:, :, : states.shape[2] // (attention.num_key_value_groups + 2)].transpose(1, 2)
            cached.lazy_initialization(key_value, key_value)
        assert cached.keys is not None and cached.values is not None
        (tokens, _, heads, width), (_, kv_heads, capacity, _) = states.shape, cached.keys.shape
        out = states.new_empty(tokens, 1, (heads - 2 * kv_heads) * width)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._library.attend(
            *_addresses(states, turn.cos, turn.sin),
            *(norm and norm.weight.data_ptr() for norm in norms),
            norms[0].variance_epsilon if norms[0] is not None else 0.0,
            *_addresses(cached.keys, cached.values, cached.plan.used, cached.plan.columns),
            tokens,
            kv_heads,
            capacity,
            attention.scaling,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def add_norm(self, hidden: Tensor, added: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """See the base class."""
        normed = torch.empty_like(hidden)
        rows, width = hidden.numel() // hidden.shape[-1], hidden.shape[-1]
        self._library.add_norm(
            *_addresses(hidden, added, norm.weight),
            norm.variance_epsilon,
            rows,
            width,
            normed.data_ptr(),
            torch.get_num_threads(),
        )
        return hidden, normed

    def gated(self, joined: Tensor, activation: Any) -> Tensor:
        """See the base class."""
        width = joined.shape[-1] // 2
        out = joined.new_empty(*joined.shape[:-1], width)
        rows = joined.numel() // (2 * width)
        self._library.gated_silu(joined.data_ptr(), rows, width, out.data_ptr(), torch.get_num_threads())
        return out


def _addresses(*tensors: Tensor) -> list[int]:
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [tensor.data_ptr() for tensor in tensors]
