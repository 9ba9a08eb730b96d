"""Scores of tokens from rows of logits, and the gradient of the logits: torch's operations, and the same in C++.

The compiled ones, built at the first pass, are for bfloat16 without truncation on a CPU with a C++ compiler and OpenMP.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
import torch
from torch import Tensor
from areal_lite.models.kernels.compiler import ARRAY, COUNT, INT, NUMBER, addresses, compile_library
from areal_lite.models.truncation import Truncation, truncate_

_SOURCE = Path(__file__).with_suffix(".cpp")
_ARGUMENTS = {
    "score": [*[ARRAY] * 2, NUMBER, *[COUNT] * 2, *[ARRAY] * 4, INT],
    "score_gradient": [*[ARRAY] * 2, NUMBER, *[ARRAY] * 4, *[COUNT] * 2, ARRAY, INT],
    "sample": [*[ARRAY] * 3, *[COUNT] * 2, *[ARRAY] * 2, INT],
}
_BLOCK_BYTES = 3 << 19  # of float32 logits that a CPU works on at once: a core's cache holds them, so each is read once


class TokenScores(NamedTuple):
    """Scores of each trained token, ``[N]`` float32, from ``log_softmax(logits / temperature)``, then truncated."""

    logprobs: Tensor  # nats
    entropy: Tensor  # nats
    sum_squared_probs: Tensor  # over the vocabulary
    log_kept: Tensor  # log of the probability mass that the truncation keeps; 0 without one


Gradients = tuple[Tensor, Tensor | None]  # of log-probs and of entropies, ``[n]``; None for entropies that have none


class ScoreOperations:
    """Scores and gradients of logits ``[n, vocabulary]``."""

    def __init__(self, temperature: float, truncation: Truncation | None) -> None:
        self.temperature, self.truncation = temperature, truncation

    def score(self, logits: Tensor, targets: Tensor) -> tuple[TokenScores, Tensor]:
        """Return the scores of the ``targets [n]``, and ``[n, 1]`` that the gradient needs."""
        parts, kept = zip(*(self._score(logits[rows], targets[rows]) for rows in _blocks(logits)), strict=True)
        return TokenScores(*map(torch.cat, zip(*parts, strict=True))), torch.cat(kept)

    def gradient(self, logits: Tensor, targets: Tensor, kept: Tensor, entropy: Tensor, grads: Gradients) -> Tensor:
        """Return the gradient of the logits from those of :meth:`score`, whose ``kept`` and entropies these are."""
        out, (grad_logprobs, grad_entropy) = torch.empty_like(logits), grads
        for rows in _blocks(logits):
            logprobs, at = self._logprobs(logits[rows]), targets[rows, None]
            if self.truncation is not None:
                logprobs, _ = truncate_(logprobs, targets[rows], kept[rows])
            of_chosen = grad_logprobs[rows, None] / self.temperature
            if grad_entropy is None:  # dlogprob/dlogit = [logit is the target's] - p
                grad = logprobs.exp_().mul_(-of_chosen)
            else:  # dH/dlogit = -p (log p + H)
                probs, of_entropy = logprobs.exp(), grad_entropy[rows, None] / self.temperature
                grad = logprobs.add_(entropy[rows, None]).mul_(of_entropy).add_(of_chosen).mul_(probs).neg_()
            out[rows] = grad.scatter_add_(1, at, of_chosen)
        return out

    def _logprobs(self, logits: Tensor) -> Tensor:
        logits = logits.float()
        return torch.log_softmax(logits if self.temperature == 1.0 else logits / self.temperature, dim=-1)

    def _score(self, logits: Tensor, targets: Tensor) -> tuple[TokenScores, Tensor]:
        """Return the scores, and the smallest log-prob that the truncation keeps."""
        logprobs = self._logprobs(logits)
        least, log_kept = logprobs.new_zeros(len(logits), 1), logprobs.new_zeros(len(logits))
        if self.truncation is not None:
            least = self.truncation.smallest_kept(logprobs)
            logprobs, log_kept = truncate_(logprobs, targets, least)
        chosen = logprobs.gather(1, targets[:, None])[:, 0]
        probs = logprobs.exp()
        squared = torch.linalg.vector_norm(probs, dim=1).square_()
        return TokenScores(chosen, probs.mul_(logprobs).sum(1).neg_(), squared, log_kept), least


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Return the rows that are computed at once: on a CPU, what a core's cache holds."""
    count, width = logits.shape
    size = max(1, _BLOCK_BYTES // (4 * width)) if logits.device.type == "cpu" else count
    return (slice(start, min(count, start + size)) for start in range(0, count, size))


class CompiledScores(ScoreOperations):
    """Keeps the log of each row's softmax denominator."""

    def __init__(self, temperature: float, library: ctypes.CDLL) -> None:
        super().__init__(temperature, None)
        self._library = library

    def score(self, logits: Tensor, targets: Tensor) -> tuple[TokenScores, Tensor]:
        chosen, entropy, squared, normalizer = torch.empty(4, len(logits))
        rows = (*addresses(logits, targets), 1 / self.temperature, *logits.shape)
        self._library.score(*rows, *addresses(chosen, entropy, squared, normalizer), torch.get_num_threads())
        return TokenScores(chosen, entropy, squared, torch.zeros(len(logits))), normalizer

    def gradient(self, logits: Tensor, targets: Tensor, kept: Tensor, entropy: Tensor, grads: Gradients) -> Tensor:
        out = torch.empty_like(logits)
        given = [torch.zeros_like(entropy) if grad is None else grad.contiguous() for grad in grads]
        rows = (*addresses(logits, targets), 1 / self.temperature, *addresses(kept, entropy, *given), *logits.shape)
        self._library.score_gradient(*rows, *addresses(out), torch.get_num_threads())
        return out


def score_operations(
    device: torch.device, dtype: torch.dtype, temperature: float, truncation: Truncation | None
) -> ScoreOperations:
    """Return the compiled operations if they fit logits of this dtype and can be compiled, else torch's."""
    library = score_library() if device.type == "cpu" and dtype == torch.bfloat16 and truncation is None else None
    return ScoreOperations(temperature, truncation) if library is None else CompiledScores(temperature, library)


@cache
def score_library() -> ctypes.CDLL | None:
    """Return the compiled functions, None without a compiler."""
    return compile_library(_SOURCE, _ARGUMENTS, otherwise="log-probs of tokens take five times as long")
