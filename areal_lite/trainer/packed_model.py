"""Sequences laid out for one forward pass, and the model that reads them.

Guarantees that a token sees what it would see in its sequence alone, however the sequences are laid
out. The shift by one (a token is predicted at the one before it) happens here, in :func:`pack`, and
nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from areal_lite.data.training_sample import TrainingSample
from areal_lite.trainer.microbatches import Row, num_inputs


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


class PackedModel(nn.Module):
    """A Hugging Face model that reads packed rows.

    Args:
        model: With a decoder (``get_decoder``) or a base model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        self._decoder = (decoder,)  # a tuple, or the decoder would be registered twice
        self._config = model.config.get_text_config()
        self.balance_length = 6 * int(getattr(self._config, "hidden_size", 1024))
        """Row length at which attention costs as much as the layers' matrices."""
        with torch.no_grad():
            self.shares_prefixes = self._packing_is_exact()
            """Whether rows may hold more than one sample: all layers are full attention and tokens are placed by
            ``position_ids``; tried on four tokens."""

    def inputs(self, packed: PackedRows) -> dict[str, Any]:
        """Return the arguments of model or decoder."""
        inputs: dict[str, Any] = {"input_ids": packed.input_ids, "use_cache": False}
        if packed.attention_mask is not None:
            inputs |= {"attention_mask": packed.attention_mask, "position_ids": packed.position_ids}
        return inputs

    def states(self, packed: PackedRows) -> Tensor:
        """Return the decoder's states ``[N, hidden]`` before each trained token."""
        states: Tensor = self._decoder[0](**self.inputs(packed))[0]
        return states.flatten(0, 1)[packed.predicted_at]

    def _packing_is_exact(self) -> bool:
        if set(getattr(self._config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            return False
        if getattr(self._config, "sliding_window", None) and getattr(
            self._config, "use_sliding_window", True
        ):
            return False
        if "position_ids" not in inspect.signature(self._decoder[0].forward).parameters:
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
        together = self.states(pack(probe, [Row((0, 1), prefix=2, length=4)], device=device))
        apart = self.states(pack(probe, [Row((i,), prefix=2, length=3) for i in (0, 1)], device=device))
        return torch.allclose(together, apart, atol=1e-3, rtol=1e-3)
