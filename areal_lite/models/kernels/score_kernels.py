"""Scores of tokens from rows of logits, and the gradient of the logits, in C++.

Used in bfloat16 on a CPU where there is a C++ compiler with OpenMP, without truncation; compiled at the first pass.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from areal_lite.models.kernels.compiler import ARRAY, COUNT, INT, NUMBER, addresses, compile_library
from areal_lite.models.kernels.score_operations import ScoreOperations, TokenScores
from areal_lite.models.truncation import Truncation

_SOURCE = Path(__file__).with_suffix(".cpp")
_ARGUMENTS = {
    "score": [*[ARRAY] * 2, NUMBER, *[COUNT] * 2, *[ARRAY] * 4, INT],
    "score_gradient": [*[ARRAY] * 2, NUMBER, *[ARRAY] * 4, *[COUNT] * 2, ARRAY, INT],
}


def score_operations(
    device: torch.device, dtype: torch.dtype, temperature: float, truncation: Truncation | None
) -> ScoreOperations:
    """Return the compiled operations if they fit and can be compiled, else torch's.

    Args:
        dtype: Dtype of the logits.
    """
    fits = device.type == "cpu" and dtype == torch.bfloat16 and truncation is None
    library = _library() if fits else None
    if library is None:
        return ScoreOperations(temperature, truncation)
    return CompiledScores(temperature, library)


@cache
def _library() -> ctypes.CDLL | None:
    return compile_library(_SOURCE, _ARGUMENTS, otherwise="log-probs of tokens take five times as long")


class CompiledScores(ScoreOperations):
    """Keeps the log of each row's softmax denominator."""

    def __init__(self, temperature: float, library: ctypes.CDLL) -> None:
        super().__init__(temperature, None)
        self._library = library

    def score(self, logits: Tensor, targets: Tensor) -> tuple[TokenScores, Tensor]:
        """See the base class."""
        chosen, entropy, squared, normalizer = torch.empty(4, len(logits))
        rows = (*addresses(logits, targets), 1 / self.temperature, *logits.shape)
        self._library.score(*rows, *addresses(chosen, entropy, squared, normalizer), torch.get_num_threads())
        return TokenScores(chosen, entropy, squared, torch.zeros(len(logits))), normalizer

    def gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        kept: Tensor,
        entropy: Tensor,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        """See the base class."""
        out = torch.empty_like(logits)
        grads = (
            grad_logprobs.contiguous(),
            torch.zeros_like(entropy) if grad_entropy is None else grad_entropy.contiguous(),
        )
        rows = (*addresses(logits, targets), 1 / self.temperature, *addresses(kept, entropy, *grads), *logits.shape)
        self._library.score_gradient(*rows, *addresses(out), torch.get_num_threads())
        return out
