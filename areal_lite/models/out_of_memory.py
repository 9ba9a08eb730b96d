"""Whether an error says that memory ran out."""

import errno
import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out; torch has an exception type for GPU memory only, and not for CUDA libraries."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return any(words in str(error) for words in ("DefaultCPUAllocator: can't allocate", "_ALLOC_FAILED"))
