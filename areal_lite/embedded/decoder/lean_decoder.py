"""The forward pass of a Llama-like model, without the overhead of its modules.

Projections of one input are one product, shared keys are not copied, and nothing but tensors is called. Rounds as the
model's own forward does. Shares the model's weights; in bfloat16 on a CPU it also keeps a packed copy of them.
"""

from typing import Any
import torch
from torch import Tensor, nn
from areal_lite.embedded.decoder.lean_decoder_kernels import LayerOperations, Turn
from areal_lite.embedded.decoder.slot_cache import SlotCache, SlotLayer
from areal_lite.models.decoder_family import DecoderLayer
from areal_lite.models.vision_model import text_decoder


class _Linear:
    """A product with a weight, or with its packed copy where that is faster."""

    def __init__(self, weight: Tensor, bias: Tensor | None, operations: LayerOperations) -> None:
        self._weight, self._bias, self._operations = weight, bias, operations
        self.packed: Tensor | None = None

    def __call__(self, states: Tensor) -> Any:
        if not self._operations.packs(states, self._weight):
            return self._operations.product(states, self._weight, self._bias)
        if self.packed is None:
            self.packed = self._operations.packed(self._weight)
        return self._operations.packed_product(states, self.packed, self._weight, self._bias)


class LeanDecoder:
    """Computes logits of ``model``, a causal LM of a known family, with a KV cache. ``operations`` compute a layer
    between its matrix products. The model's projections of one input become views of a joined weight."""

    def __init__(self, model: Any, cache: SlotCache, operations: LayerOperations) -> None:
        self._cache = cache
        self._body = text_decoder(model) or model.model
        self._operations = operations
        self.pads = operations.pads  # the slots of a pass need equally many tokens; if not, each is a row of its own
        self._head = self._joined(model.get_output_embeddings())
        self._layers = [DecoderLayer.of(layer, self._joined) for layer in self._body.layers]

    def weights_changed(self) -> None:
        """Drop the packed copies; the next pass makes new ones."""
        for linear in (self._head, *(part for layer in self._layers for part in layer if isinstance(part, _Linear))):
            linear.packed = None

    def forward(self, inputs: Tensor, positions: Tensor, masks: dict[str, Tensor], last: Tensor) -> Tensor:
        """Run a pass that the cache's plan describes, store its KV, and return the logits ``[m, vocab]``.

        Args:
            inputs: ``[n, q]`` token ids, or ``[n, q, width]`` embeddings, which change.
            positions: ``[n, q]`` their positions, or ``[3, n, q]`` on three axes.
            masks: ``[n, 1, q, kv]`` added to the scores of each kind of layers; those missing are causal.
            last: ``[m]`` the tokens that need logits, numbered through all rows.
        """
        operations, groups = self._operations, self._layers[0].attention.num_key_value_groups
        hidden = inputs if inputs.ndim == 3 else self._body.embed_tokens(inputs)
        angles = self._body.rotary_emb(hidden, positions)
        turns = {kind: Turn.of(angles, masks.get(kind), groups) for kind in self._cache.kinds}
        normed = operations.norm(hidden, self._layers[0].input_norm)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._body.norm]
        for layer, next_norm, cached in zip(self._layers, next_norms, self._cache.layers, strict=True):
            assert isinstance(cached, SlotLayer)
            states = layer.qkv(normed).view(*hidden.shape[:2], -1, layer.attention.head_dim)
            read = layer.output(operations.attend(states, layer.attention, cached, turns[cached.kind]))
            hidden, normed = operations.add_norm(hidden, read, layer.mlp_norm)
            added = layer.down(operations.gated(layer.gate_up(normed), layer.activation))
            hidden, normed = operations.add_norm(hidden, added, next_norm)
        logits: Tensor = self._head(normed.flatten(0, 1)[last])
        return logits

    def _joined(self, *linears: nn.Linear) -> _Linear:
        """Return weight and bias of one product in place of several, of which they become views."""

        def joined(parts: list[Tensor]) -> Tensor:
            whole = torch.cat(parts)
            for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
                part.data = view
            return whole

        if len(linears) == 1:
            return _Linear(linears[0].weight, linears[0].bias, self._operations)
        bias = None if linears[0].bias is None else joined([linear.bias for linear in linears])
        return _Linear(joined([linear.weight for linear in linears]), bias, self._operations)
