"""Families of decoders with Llama's layers: which models they are, how they differ, and how a layer names its parts.

The server's :mod:`lean_decoder` and the trainer's :mod:`fused_decoder` read models through this module alone; models of
other families run their own forward pass. Layers may have a sliding window, but the trainer does not fuse such models.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self
from torch import nn

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen2VLText", "Qwen2_5_VLText", "Qwen3", "Gemma")
"""They begin the classes' names in transformers. Gemma's norms scale by one plus their weight."""


def family_of(model: Any) -> str | None:
    """Return the family of a causal LM or of its decoder, None if its layers have another form."""
    # The whole class name, not ``config.model_type``: a subclass or a remote-code model may compute something else.
    name = type(model).__name__.removesuffix("ForCausalLM").removesuffix("Model")
    return name if name in FAMILIES else None


def fits_kernels(model: Any) -> bool:
    """Return whether norms and gates are those that compiled operations compute: plain scales, and SiLU."""
    return family_of(model) not in (None, "Gemma") and model.config.hidden_act == "silu"


class Heads(NamedTuple):
    """The parts of a token's states ``[(queries + 2 * keys) * width]``: queries, keys, values."""

    queries: int
    keys: int
    width: int
    scale: float  # factor of the scores


class DecoderLayer(NamedTuple):
    """The parts of a layer. Every linear layer may have a bias."""

    attention: Any  # the model's own, for its sizes and norms
    input_norm: Any
    qkv: Any  # a tuple of linear layers, or the product that stands for them; so are the other linear layers
    output: Any
    mlp_norm: Any
    gate_up: Any
    down: Any
    activation: nn.Module

    @classmethod
    def of(cls, layer: Any, product_of: Callable[..., Any] = lambda *linears: linears) -> Self:
        """Return the parts of a layer, with a product in place of the linear layers that read the same input."""
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            attention=attention,
            input_norm=layer.input_layernorm,
            qkv=product_of(attention.q_proj, attention.k_proj, attention.v_proj),
            output=product_of(attention.o_proj),
            mlp_norm=layer.post_attention_layernorm,
            gate_up=product_of(mlp.gate_proj, mlp.up_proj),
            down=product_of(mlp.down_proj),
            activation=mlp.act_fn,
        )

    @property
    def linears(self) -> list[nn.Linear]:
        return [*self.qkv, *self.output, *self.gate_up, *self.down]

    @property
    def heads(self) -> Heads:
        width = self.attention.head_dim
        queries, keys, _ = (linear.out_features // width for linear in self.qkv)
        return Heads(queries, keys, width, self.attention.scaling)


def query_key_norms(attention: Any) -> tuple[Any, Any] | None:
    """Return the norms of queries and keys before rotation, if the family has them."""
    return (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
