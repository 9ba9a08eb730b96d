"""DAPO's soft penalty on answers close to the length limit."""

from __future__ import annotations

from torch import Tensor

from areal_lite.errors import ConfigError


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Return the penalty to add to each answer's score: 0 up to the buffer, then linear to -1 at the limit.

    With ``max_length=10, buffer=4`` lengths ``[6, 8, 10, 12]`` give ``[0, -0.5, -1, -1]``.

    Args:
        lengths: ``[E]`` sampled tokens of each episode.
        max_length: Limit in tokens.
        buffer: Number of tokens before the limit over which the penalty grows.

    Returns:
        ``[E]`` float32 in ``[-1, 0]``.

    Raises:
        ConfigError: If the buffer is not between 1 and the limit.

    Source: DAPO (arXiv:2503.14476), overlong reward shaping.
    """
    if not 1 <= buffer <= max_length:
        raise ConfigError(
            f"overlong buffer is {buffer} with a max_length of {max_length}: choose 1 to {max_length} tokens"
        )
    return ((max_length - buffer - lengths).float() / buffer).clamp(-1.0, 0.0)
