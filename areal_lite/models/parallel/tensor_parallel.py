"""Layers divided among ranks: each computes some heads of every attention and some columns of every product.

Guarantees the results of one rank up to the order of sums, for the models that transformers has a plan for. All ranks
read the same tokens, and each scores some of them; weights that no plan divides are equal on all.
"""

import re
from collections.abc import Callable
from math import gcd
from typing import Any
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from areal_lite.errors import ConfigError
from areal_lite.models.parallel.ranks import Ranks

Whole = Callable[[Tensor], Tensor]
_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size")


def refuse_plan(config: Any, tp_size: int, name: str) -> None:
    """Raise ConfigError if ``tp_size`` ranks cannot divide the layers of the model ``name``, by its text config."""
    plan = config.base_model_tp_plan or {}
    if not plan or (unknown := sorted(set(plan.values()) - _STYLES)):
        reason = f"whose layers are divided in ways not known here ({', '.join(unknown)})" if plan else "without a plan"
        raise ConfigError(
            f"trainer.tp_size is {tp_size}, and {name} is a {config.model_type} model, {reason} to divide its layers: "
            "set trainer.tp_size: 1, or sp_size for long sequences"
        )
    sizes = {key: size for key in _DIVIDED if (size := getattr(config, key, None))}
    if any(size % tp_size for size in sizes.values()):
        common = gcd(*sizes.values())
        possible = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
        found = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise ConfigError(
            f"trainer.tp_size is {tp_size}, and {name} has {found}, which ranks divide equally: use one of {possible}"
        )


def refuse_images(tp_size: int, name: str) -> None:
    """Raise ConfigError if several ranks would divide the layers of the model ``name``, which reads images."""
    if tp_size > 1:
        raise ConfigError(
            f"trainer.tp_size is {tp_size}, and {name} reads images, without a plan to divide the layers of its tower: "
            "set trainer.tp_size: 1, or sp_size for long sequences"
        )


def divide_layers(model: Any, ranks: Ranks) -> None:
    """Divide the layers of ``model`` in place among the ``tp`` ranks by transformers' plan; raises ConfigError as
    :func:`refuse_plan` does. Call this before weights are sharded."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    assert ranks.mesh is not None
    refuse_plan(model.config.get_text_config(), ranks.tp, f"this {type(model).__name__}")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    # By columns, as the number of rows, the vocabulary's, is often odd.
    styles, plan = {embedding: "embedding_colwise", head: "rowwise_split_input"}, dict[str, str]()
    for name, module in model.named_modules():
        if style := styles.get(module) or model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)):
            for part in _parts(name, module, style):
                own = dict(model.get_submodule(part).named_parameters(recurse=False))
                plan |= {f"{part}.{key}": style for key in own if not (tied and module is head)} | {part: style}
    apply_tensor_parallelism(model, ranks.mesh["tp"], plan)
    if tied:
        head.weight = embedding.weight


def _parts(name: str, module: nn.Module, style: str) -> list[str]:
    """Return the modules to divide: this one, or its base layer and the half of its adapter that meets the split."""
    if not hasattr(module, "base_layer"):
        return [name]
    half = "lora_A" if style == "rowwise" else "lora_B"
    return [f"{name}.base_layer", *(f"{name}.{half}.{adapter}" for adapter in getattr(module, half))]


def own_tokens(ranks: Ranks, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Whole]:
    """Return the states ``[n, hidden]`` and targets of this rank's share of ``N`` tokens, all of whose states each
    ``tp`` rank has, and what joins values of the share with those of the other ranks."""
    group = ranks.group("tp")
    chosen = torch.arange(len(targets), device=targets.device)[ranks.tp_rank :: ranks.tp]
    chosen, whole = share(chosen, len(targets), group)
    states = _Copied.apply(states, group)  # type: ignore[no-untyped-call]
    return states[chosen], targets[chosen], whole


def whole_weight(weight: Tensor) -> Tensor:
    """Return a weight with the parts of all ``tp`` ranks; its gradient is the sum of theirs."""
    return weight.full_tensor(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight


def share(chosen: Tensor, count: int, group: Any) -> tuple[Tensor, Whole]:
    """Return the indices of the tokens whose values a rank computes, at least one, and what joins its values with those
    of the other ranks of ``group`` to ``[count]``. A rank without a token computes the first, which counts nothing."""
    used = bool(len(chosen))
    places = chosen if used else torch.zeros(1, dtype=torch.int64, device=chosen.device)

    def whole(values: Tensor) -> Tensor:
        own = values.new_zeros(count).index_add(0, places, values * used)
        total: Tensor = _Sum.apply(own, group)  # type: ignore[no-untyped-call]
        return total

    return places, whole


class _Sum(torch.autograd.Function):
    """The sum over ranks. Each computes the whole loss of it, so its gradient is that of each part."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Copied(torch.autograd.Function):
    """What all ranks have alike, and use different parts of: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
