"""Forward and backward passes of a Llama-like model in bfloat16 on a CPU, in fewer and larger operations.

Gives what the model's own forward pass gives under autocast, up to the rounding of bfloat16: residuals, norms, rotary
angles, attention scores and softmax are float32. Weights are rounded once per update, projections of one input are one
product, and the last layer computes the chosen tokens only.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from areal_lite.models.attention_windows import window_of
from areal_lite.models.decoder_family import DecoderLayer, fits_kernels, query_key_norms
from areal_lite.models.kernels.fused_decoder_kernels import DecoderOperations, Tokens, fused_decoder_operations
from areal_lite.models.kernels.ragged_attention import Segments


class FusedDecoder:
    """Reads packed bins with a decoder that ``fits``: full attention, float32 weights on a CPU. Products and saved
    activations have ``dtype``."""

    def __init__(self, decoder: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        self._decoder = decoder
        self._dtype = dtype
        self._heads = DecoderLayer.of(decoder.layers[0]).heads
        self._layers = [DecoderLayer.of(layer, partial(_Product, dtype)) for layer in decoder.layers]

    @staticmethod
    def fits(decoder: Any) -> bool:
        return (
            fits_kernels(decoder)
            and window_of(decoder.config) is None
            and decoder.config.attention_dropout == 0
            and not decoder.gradient_checkpointing
            and all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in decoder.parameters())
            and all(type(linear) is nn.Linear for layer in decoder.layers for linear in DecoderLayer.of(layer).linears)
        )

    def states(
        self, hidden: Tensor, position_ids: Tensor, lengths: Sequence[int], segments: Segments | None, at: Tensor
    ) -> Tensor:
        """Return the states ``[N, hidden]`` at the chosen tokens, float32.

        Args:
            hidden: ``[T, hidden]`` embeddings of the tokens, bin after bin.
            position_ids: ``[1, T]``, or ``[3, 1, T]`` on three axes.
            lengths: Tokens of each bin.
            segments: Which tokens see one another; None if a token sees all before it in its bin.
            at: ``[N]`` indices of tokens.
        """
        cos, sin = self._decoder.rotary_emb(hidden, position_ids)
        tokens = Tokens(cos[0], sin[0], lengths, segments, self._heads)
        added, operations = torch.zeros_like(hidden, dtype=self._dtype), fused_decoder_operations(self._dtype)
        for layer in self._layers:
            hidden, normed = _add_norm(hidden, added, layer.input_norm, operations)
            joined = layer.qkv(normed)
            if (norms := query_key_norms(layer.attention)) is not None:
                parts = [self._heads.queries, self._heads.keys, self._heads.keys]
                query, key, value = torch.split(joined.view(len(joined), -1, self._heads.width), parts, 1)
                joined = torch.cat([norms[0](query), norms[1](key), value], 1).flatten(1).to(joined.dtype)
            read = operations.attend(joined, tokens)
            if layer is self._layers[-1]:
                hidden, read = hidden[at], read[at]
            hidden, normed = _add_norm(hidden, layer.output(read), layer.mlp_norm, operations)
            added = layer.down(operations.gate(layer.gate_up(normed)))
        states: Tensor = self._decoder.norm(hidden + added)
        return states


class _Product:
    """One product with the weights of several linear layers."""

    def __init__(self, dtype: torch.dtype, *linears: nn.Linear) -> None:
        self.weights = [linear.weight for linear in linears]
        self._biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self.sizes = [linear.out_features for linear in linears]
        self._rounded = torch.empty(sum(self.sizes), linears[0].in_features, dtype=dtype)
        self._versions: list[tuple[int, int]] = []

    def rounded(self) -> Tensor:
        """Return the joined weight, rounded again if it has changed."""
        versions = [(weight.data_ptr(), weight._version) for weight in self.weights]
        if versions != self._versions:
            for part, weight in zip(torch.split(self._rounded, self.sizes), self.weights, strict=True):
                part.copy_(weight.detach())
            self._versions = versions
        return self._rounded

    def __call__(self, states: Tensor) -> Tensor:
        bias = torch.cat(self._biases).to(self._rounded.dtype) if self._biases else None
        product: Tensor = _JoinedProduct.apply(states, bias, self.rounded(), *self.weights)  # type: ignore[no-untyped-call]
        return product


class _JoinedProduct(torch.autograd.Function):
    """The product with a joined weight; the gradients of its parts are float32."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, bias: Tensor | None, rounded: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        ctx.rounded, ctx.sizes = rounded, [len(weight) for weight in weights]
        return F.linear(states, rounded, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (states,) = ctx.saved_tensors
        grad_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        weights = (part.float() for part in (grad.T @ states).split(ctx.sizes))
        return grad @ ctx.rounded, grad_bias, None, *weights


def _add_norm(hidden: Tensor, added: Tensor, norm: Any, operations: DecoderOperations) -> tuple[Tensor, Tensor]:
    both: tuple[Tensor, Tensor] = _AddNorm.apply(  # type: ignore[no-untyped-call]
        hidden, added, norm.weight, norm.variance_epsilon, operations
    )
    return both


class _AddNorm(torch.autograd.Function):
    """A float32 residual plus what is added, and its RMS norm."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, added: Tensor, scale: Tensor, eps: float, operations: DecoderOperations
    ) -> tuple[Tensor, Tensor]:
        total, normed, inverse = operations.add_norm(hidden, added, scale, eps)
        ctx.save_for_backward(total, scale, inverse)
        ctx.operations = operations
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.operations.norm_gradient(grad, grad_total, *ctx.saved_tensors), None, None
