"""Truncated sampling (top-k, top-p, min-p), replayed on the trainer's own log-probs.

Guarantees that log-probs describe the distribution that tokens are sampled from: as in SGLang, all three limits act on
the same probabilities, after the temperature, and the rest is renormalized. Ties with the last kept one are kept.
"""

import math
from dataclasses import dataclass
import torch
from torch import Tensor

_FIRST_TRY = 1024  # most probable tokens to sort first; the whole vocabulary is sorted only where top-p keeps more
DROPPED = -1e30  # log-prob of a dropped token: finite, so that probability times log-prob is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Limits of truncated sampling, as in ``GenerationHyperparameters``."""

    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    reported: bool = False  # True if the engine's log-probs are renormalized already, as vLLM's processed ones are

    @torch.no_grad()
    def smallest_kept(self, logprobs: Tensor) -> Tensor:
        """Return the smallest kept log-prob ``[n, 1]`` of ``logprobs [n, vocabulary]``."""
        vocabulary = logprobs.shape[1]
        limit = min(self.top_k or vocabulary, vocabulary)
        least = torch.full_like(logprobs[:, :1], -math.inf)
        if self.min_p > 0:
            least = logprobs.amax(1, keepdim=True) + math.log(self.min_p)
        if self.top_p == 1:
            return least if self.top_k is None else torch.maximum(least, logprobs.topk(limit).values[:, -1:])
        width = min(limit, _FIRST_TRY)
        nucleus, complete = _nucleus(logprobs.topk(width).values, self.top_p)
        if width < limit and not bool(complete.all()):
            rest = ~complete
            nucleus[rest] = _nucleus(logprobs[rest].topk(limit).values, self.top_p)[0]
        return torch.maximum(least, nucleus)


def _nucleus(largest: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the smallest log-prob ``[n, 1]`` of each nucleus, and ``[n]`` whether ``largest [n, k]`` holds it."""
    probs = largest.double().exp()
    kept = probs.cumsum(1) - probs <= top_p
    return largest.gather(1, kept.sum(1, keepdim=True) - 1), probs.sum(1) > top_p


def truncate_(logprobs: Tensor, targets: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Renormalize ``logprobs [n, vocabulary]``, in place, over those from ``least [n, 1]`` up and the sampled
    ``targets [n]``, which may miss it by rounding. Return them, and the log of the kept mass ``[n]``."""
    logprobs = logprobs.masked_fill_((logprobs < least).scatter_(1, targets[:, None], False), DROPPED)
    log_kept = logprobs.logsumexp(1)
    return logprobs - log_kept[:, None], log_kept
