"""Log-probs of the trained tokens under a causal language model.

Guarantees that a token's log-prob is the one the model gives to that sequence alone, however the
sequences are laid out, and that logits exist for a few positions at a time only. The shift by one
(a token is predicted at the one before it) happens here, in :func:`pack`, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areal_lite.data.training_sample import TrainingSample
from areal_lite.errors import ConfigError
from areal_lite.trainer.microbatches import Row, num_inputs

LOGIT_POSITIONS = 512
"""Positions whose logits exist at once; 512 x 49,152 float32 are 100 MB."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A micro-batch as tensors: ``R`` rows of ``L`` tokens, ``N`` trained tokens."""

    input_ids: Tensor
    """``[R, L]`` int64."""
    position_ids: Tensor
    """``[R, L]`` place of each token in its own sequence."""
    attention_mask: Tensor | None
    """``[R, 1, L, L]`` bool, True where the query sees the key; None where it is plain causal."""
    predicted_at: Tensor
    """``[N]`` flat position of the token before each trained one."""
    targets: Tensor
    """``[N]`` the trained tokens, row by row, sample by sample."""


def pack(samples: Sequence[TrainingSample], rows: Sequence[Row], *, device: torch.device) -> PackedRows:
    """Lay the rows out: the common prefix, then each sample's own tokens, which see only the prefix and themselves."""
    length = max(row.length for row in rows)
    ids = np.zeros((len(rows), length), np.int64)
    positions = np.zeros_like(ids)
    owner = np.full_like(ids, -1)  # 0 the prefix, 1.. the samples, -1 padding
    predicted_at: list[np.ndarray[Any, Any]] = []
    targets: list[np.ndarray[Any, Any]] = []
    for r, row in enumerate(rows):
        ids[r, : row.prefix] = samples[row.samples[0]].input_ids[: row.prefix]
        positions[r, : row.prefix] = np.arange(row.prefix)
        owner[r, : row.prefix] = 0
        end = row.prefix
        for number, index in enumerate(row.samples, start=1):
            sample, inputs = samples[index], num_inputs(samples[index])
            start, end = end, end + inputs - row.prefix
            ids[r, start:end] = sample.input_ids[row.prefix : inputs]
            positions[r, start:end] = np.arange(row.prefix, inputs)
            owner[r, start:end] = number
            trained = np.flatnonzero(sample.loss_mask)
            before = trained - 1
            predicted_at.append(
                r * length + np.where(before < row.prefix, before, before - row.prefix + start)
            )
            targets.append(sample.input_ids[trained])
    mask = None
    if any(len(row.samples) > 1 for row in rows):
        owners = torch.from_numpy(owner).to(device)
        seen = (owners[:, None, :] == 0) | (owners[:, None, :] == owners[:, :, None])
        mask = (seen & torch.ones(length, length, dtype=torch.bool, device=device).tril())[:, None]
    return PackedRows(
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=torch.from_numpy(positions).to(device),
        attention_mask=mask,
        predicted_at=torch.from_numpy(np.concatenate(predicted_at)).to(device),
        targets=torch.from_numpy(np.concatenate(targets)).to(device),
    )


class TokenScorer:
    """A causal LM seen as a function from packed rows to log-probs and entropies.

    ``shares_prefixes`` says whether rows may hold more than one sample: it takes a model whose layers
    are all full attention and that places tokens by ``position_ids``; tried on three tokens at the
    start. Where the model does more to logits than its output embedding (soft caps, scales), full
    logits are computed.

    Raises:
        ConfigError: If ``temperature`` is not above 0.
    """

    def __init__(self, model: Any, *, temperature: float) -> None:
        if temperature <= 0:
            raise ConfigError(
                f"temperature is {temperature}: the trainer divides logits by it; sample with one above 0"
            )
        self.model = model
        self.temperature = temperature
        self._decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        self.balance_length = 6 * int(getattr(model.config.get_text_config(), "hidden_size", 1024))
        with torch.no_grad():
            self._head = self._plain_head()
            self.shares_prefixes = self._packing_is_exact()

    def __call__(self, packed: PackedRows, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Return ``([N] log-probs, [N] entropies)`` in nats, float32, of ``log_softmax(logits / temperature)``.

        Entropies carry gradient only with ``entropy_grad``.
        """
        inputs: dict[str, Any] = {"input_ids": packed.input_ids, "use_cache": False}
        if packed.attention_mask is not None:
            inputs |= {"attention_mask": packed.attention_mask, "position_ids": packed.position_ids}
        if self._head is None:
            logits = self.model(**inputs).logits.flatten(0, 1)[packed.predicted_at]
            return _score_logits(logits, packed.targets, self.temperature, entropy_grad)
        states = self._decoder(**inputs)[0].flatten(0, 1)[packed.predicted_at]
        scores: tuple[Tensor, Tensor] = ChunkedScores.apply(  # type: ignore[no-untyped-call]
            states, self._head.weight, self._head.bias, packed.targets, self.temperature, entropy_grad
        )
        return scores

    def _plain_head(self) -> nn.Linear | None:
        """Return the output embedding where logits are nothing but that times the decoder's states."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            return None
        ids = torch.arange(1, 5, device=self.model.device)[None]
        logits = self.model(input_ids=ids, use_cache=False).logits
        states = self._decoder(input_ids=ids, use_cache=False)[0]
        same = states.shape[:2] == ids.shape and torch.allclose(head(states), logits, atol=1e-4, rtol=1e-4)
        return head if same else None

    def _packing_is_exact(self) -> bool:
        config = self.model.config.get_text_config()
        if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            return False
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            return False
        if "position_ids" not in inspect.signature(self._decoder.forward).parameters:
            return False
        probe = [
            TrainingSample(
                input_ids=np.array([1, 2, *tail]),
                loss_mask=np.array([False, False, True, True]),
                reward=0.0,
                group_id="",
            )
            for tail in ([3, 4], [4, 3])
        ]
        device = self.model.device
        together, _ = self(pack(probe, [Row((0, 1), prefix=2, length=4)], device=device))
        apart, _ = self(pack(probe, [Row((i,), prefix=2, length=3) for i in (0, 1)], device=device))
        return torch.allclose(together, apart, atol=1e-3)


class ChunkedScores(torch.autograd.Function):
    """Log-probs and entropies from states and output embedding, with logits of one chunk at a time.

    The backward pass makes the logits again: a product more, but no ``[N, vocabulary]`` is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        ctx.dtypes = states.dtype, weight.dtype
        ctx.temperature, ctx.entropy_grad = temperature, entropy_grad
        states, weight = states.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        chosen, entropies = [], []
        for start in range(0, len(states), LOGIT_POSITIONS):
            here = slice(start, start + LOGIT_POSITIONS)
            logprobs = _logprobs(F.linear(states[here], weight, bias), temperature)
            chosen.append(logprobs.gather(1, targets[here, None])[:, 0])
            entropies.append(logprobs.exp().mul_(logprobs).sum(1).neg_())
        entropy = torch.cat(entropies)
        ctx.save_for_backward(states, weight, bias, targets, entropy)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return torch.cat(chosen), entropy

    @staticmethod
    def backward(ctx: Any, grad_chosen: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, entropy = ctx.saved_tensors
        states_dtype, weight_dtype = ctx.dtypes
        grad_chosen, grad_entropy = grad_chosen / ctx.temperature, grad_entropy / ctx.temperature
        grad_states = torch.empty_like(states, dtype=states_dtype)
        grad_weight = torch.zeros_like(weight, dtype=weight_dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=weight_dtype)
        for start in range(0, len(states), LOGIT_POSITIONS):
            here = slice(start, start + LOGIT_POSITIONS)
            logprobs = _logprobs(F.linear(states[here], weight, bias), ctx.temperature)
            if ctx.entropy_grad:  # dH/dlogit = -p (log p + H)
                probs = logprobs.exp()
                slope = logprobs.add_(entropy[here, None]).mul_(grad_entropy[here, None])
                grad_logits = slope.add_(grad_chosen[here, None]).mul_(probs).neg_()
            else:  # dlogprob/dlogit = [logit is the target's] - p
                grad_logits = logprobs.exp_().mul_(-grad_chosen[here, None])
            grad_logits.scatter_add_(1, targets[here, None], grad_chosen[here, None])
            scaled = grad_logits.to(states.dtype)
            grad_states[here] = scaled @ weight
            grad_weight += scaled.T @ states[here]
            if grad_bias is not None:
                grad_bias += scaled.sum(0)
        return grad_states, grad_weight, grad_bias, None, None, None


def _score_logits(
    logits: Tensor, targets: Tensor, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    logprobs = _logprobs(logits, temperature)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    spread = logprobs if entropy_grad else logprobs.detach()
    return chosen, -(spread.exp() * spread).sum(1)


def _logprobs(logits: Tensor, temperature: float) -> Tensor:
    if temperature != 1.0:
        logits = logits.float() / temperature
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)
