"""C++ of the package, compiled when a process first needs it; nothing is kept on disk.

Takes half a second to a second. Without a compiler, torch's operations do the same more slowly.
"""

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from torch import Tensor

logger = logging.getLogger(__name__)

ARRAY, COUNT, NUMBER, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int  # types of arguments
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", f"-I{Path(__file__).parent}"]


def find_compiler() -> str | None:
    """Return the path of the C++ compiler: ``c++``, or what CXX names."""
    return shutil.which(os.environ.get("CXX", "c++"))


def compile_library(
    source: Path, arguments: Mapping[str, list[Any]], *defines: str, otherwise: str
) -> ctypes.CDLL | None:
    """Return the compiled functions, or None if compiling fails, logged with the cost ``otherwise``. ``arguments`` are
    the ctypes each takes; none returns anything. ``defines`` are ``NAME=value`` for the preprocessor."""
    compiler = find_compiler()
    if compiler is None:
        logger.info("no C++ compiler: %s. Install g++, or set CXX to a compiler.", otherwise)
        return None
    try:
        library = _compiled(compiler, source, defines)
    except (OSError, subprocess.CalledProcessError) as error:
        cause = getattr(error, "stderr", None) or error
        logger.warning("%s: %s cannot compile %s: %s", otherwise, compiler, source.name, str(cause)[-500:])
        return None
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


@cache
def _compiled(compiler: str, source: Path, defines: tuple[str, ...]) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="areal-lite-") as folder:
        # Linked in a step of its own: -ffast-math there would change the arithmetic of the whole process, and -fopenmp
        # would add a second pool of threads to torch's.
        commands = (
            [*_FLAGS, *(f"-D{define}" for define in defines), "-c", str(source), "-o", "library.o"],
            ["-shared", "library.o", "-o", "library.so"],
        )
        for arguments in commands:
            subprocess.run([compiler, *arguments], cwd=folder, check=True, capture_output=True, text=True)
        return ctypes.CDLL(str(Path(folder) / "library.so"))


def addresses(*tensors: Tensor) -> list[int]:
    """Return where the tensors' numbers are; they lie one after another."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [tensor.data_ptr() for tensor in tensors]
