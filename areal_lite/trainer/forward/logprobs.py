"""Log-probs of the trained tokens under a causal language model; logits exist for only a few positions at a time."""

from collections.abc import Iterator
from typing import Any, NamedTuple
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from areal_lite.errors import ConfigError
from areal_lite.models.kernels.exact_attention import MIN_ROWS
from areal_lite.models.kernels.score_kernels import TokenScores, score_operations
from areal_lite.models.parallel.tensor_parallel import whole_weight
from areal_lite.models.truncation import Truncation, truncate_
from areal_lite.trainer.forward.packed_model import PackedModel, PackedSequences

LOGIT_BYTES = 64 << 20
"""Size of the logits that exist at once, with up to two copies: on a GPU, where the copies are float32, 341 positions
for a vocabulary of 49,152 and 110 for 151,936; on a CPU twice as many in bfloat16."""
_PIECE = 4096  # tokens of the vocabulary whose weights get their gradient at once on a CPU


class TokenScorer(PackedModel):
    """From packed sequences to a causal LM's log-probs; one that transforms logits (soft caps) computes all of them."""

    def __init__(self, model: Any, *, temperature: float, truncation: Truncation | None = None) -> None:
        if temperature <= 0:
            raise ConfigError(
                f"temperature is {temperature}: the trainer divides logits by it; sample with a temperature above 0"
            )
        super().__init__(model)
        self.num_head_weights = model.get_input_embeddings().weight.numel()
        self.temperature = temperature
        self.truncation = truncation

    def find_reading(self) -> None:
        """Find also the output embedding, if the logits are its plain product with the decoder's states."""
        super().find_reading()
        self._head: tuple[nn.Linear | None] = (None,)
        head = self.model.get_output_embeddings()
        if isinstance(head, nn.Linear):
            ids = torch.arange(4, device=self.model.device)[None]
            logits = self.model(input_ids=ids, use_cache=False).logits
            states = self._decoder[0](input_ids=ids, use_cache=False)[0]
            # Bit-equal: a soft cap of 30 changes the small logits of a fresh model by no more than rounding.
            if states.shape[:2] == ids.shape and torch.equal(head(states), logits):
                self._head = (head,)

    def score(
        self,
        packed: PackedSequences,
        *,
        entropy_grad: bool = False,
        truncated: bool = True,
        temperature: float | None = None,
    ) -> TokenScores:
        """Return the scores of the trained tokens; log-probs carry gradient, entropies only with ``entropy_grad``.
        Without ``truncated`` they are those of the whole vocabulary; ``temperature`` replaces the model's own."""
        (head,) = self._head
        packed, whole = self.own_part(packed)
        scoring = Scoring(temperature or self.temperature, self.truncation if truncated else None, entropy_grad)
        if head is None:
            return TokenScores(*map(whole, _score_logits(self.read(self.model, packed), packed.targets, scoring)))
        states, targets, joined = self.own_tokens(self.states(packed), packed.targets)
        scores: tuple[Tensor, ...] = ChunkedScores.apply(  # type: ignore[no-untyped-call]
            states, whole_weight(head.weight), head.bias, targets, scoring
        )
        return TokenScores(*(whole(joined(values)) for values in scores))


class Scoring(NamedTuple):
    temperature: float
    truncation: Truncation | None = None
    entropy_grad: bool = False  # give entropies a gradient


class ChunkedScores(torch.autograd.Function):
    """Scores from states ``[N, hidden]`` and output embedding ``[vocabulary, hidden]``, a chunk of positions at a time.
    The backward pass recomputes logits that are more than one chunk: no ``[N, vocabulary]`` tensor is kept."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scoring: Scoring
    ) -> tuple[Tensor, ...]:
        temperature, truncation, entropy_grad = scoring
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        ctx.dtypes = states.dtype, weight.dtype
        ctx.entropy_grad = entropy_grad
        states, weight = states.to(dtype), weight.to(dtype)
        head = ctx.head = _Head(weight, None if bias is None else bias.to(dtype))
        operations = ctx.operations = score_operations(states.device, dtype, temperature, truncation)
        parts, logits = [], None
        for chunk in _chunks(len(states), head):
            logits = head.logits(states[chunk])
            parts.append(operations.score(logits, targets[chunk]))
        ctx.logits = logits if head.chunk >= len(states) else None
        scores, kept = zip(*parts, strict=True)
        chosen, entropy, squared, log_kept = (torch.cat(part) for part in zip(*scores, strict=True))
        ctx.save_for_backward(states, targets, entropy, torch.cat(kept))
        ctx.mark_non_differentiable(squared, log_kept, *([] if entropy_grad else [entropy]))
        return chosen, entropy, squared, log_kept

    @staticmethod
    def backward(ctx: Any, grad_chosen: Tensor, grad_entropy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        states, targets, entropy, kept = ctx.saved_tensors
        head: _Head = ctx.head
        states_dtype, weight_dtype = ctx.dtypes
        grad_states = torch.empty_like(states, dtype=states_dtype)
        # A frozen head, as with low-rank adapters, needs no gradient.
        grad_weight = torch.empty_like(head.weight, dtype=weight_dtype) if ctx.needs_input_grad[1] else None
        grad_bias = head.weight.new_zeros(len(head.weight), dtype=weight_dtype) if ctx.needs_input_grad[2] else None
        for chunk in _chunks(len(states), head):
            logits = head.logits(states[chunk]) if ctx.logits is None else ctx.logits
            grads = grad_chosen[chunk], grad_entropy[chunk] if ctx.entropy_grad else None
            grad_logits = ctx.operations.gradient(logits, targets[chunk], kept[chunk], entropy[chunk], grads)
            grad_states[chunk] = grad_logits @ head.weight
            if grad_weight is not None:
                head.weight_gradient(grad_weight, grad_logits, states[chunk], add=chunk.start > 0)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            del logits, grad_logits  # free them before the next chunk
        return grad_states, grad_weight, grad_bias, None, None


class _Head(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    @property
    def chunk(self) -> int:  # positions whose logits exist at once
        itemsize = self.weight.itemsize if self.weight.device.type == "cpu" else 4
        return max(1, LOGIT_BYTES // (itemsize * len(self.weight)))

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(F.pad(states, (0, 0, 0, max(0, MIN_ROWS - len(states)))), self.weight, self.bias)[: len(states)]

    def weight_gradient(self, total: Tensor, grad_logits: Tensor, states: Tensor, *, add: bool) -> None:
        if grad_logits.dtype == total.dtype:
            total.addmm_(grad_logits.T, states, beta=int(add))
        else:  # in pieces that stay in a CPU's cache until they are added
            size = _PIECE if total.device.type == "cpu" else len(total)
            for part, columns in zip(torch.split(total, size), torch.split(grad_logits, size, 1), strict=True):
                product = columns.T @ states
                part.add_(product) if add else part.copy_(product)


def _chunks(count: int, head: _Head) -> Iterator[slice]:
    return (slice(start, min(count, start + head.chunk)) for start in range(0, count, head.chunk))


def _score_logits(logits: Tensor, targets: Tensor, scoring: Scoring) -> TokenScores:
    temperature, truncation, entropy_grad = scoring
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    log_kept = logprobs.new_zeros(len(logprobs))
    if truncation is not None:
        logprobs, log_kept = truncate_(logprobs.clone(), targets, truncation.smallest_kept(logprobs))
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    spread = logprobs if entropy_grad else logprobs.detach()
    probs = spread.exp()
    return TokenScores(chosen, -(probs * spread).sum(1), probs.detach().square().sum(1), log_kept.detach())
