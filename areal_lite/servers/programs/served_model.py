"""The model that the servers of a run start with."""

from __future__ import annotations

from dataclasses import dataclass

from areal_lite.models.adapter_shape import AdapterShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model, and how servers sample from it; the same for all servers of a run."""

    model_path: str
    """Folder of model and tokenizer, or a name on the Hugging Face Hub."""
    seed: int = 0
    """Seed for requests without one."""
    deterministic: bool = False
    """The bits of an answer depend on its request and the weights only: the embedded server runs requests one by one.
    In float32 on a CPU the bits equal the trainer's."""
    weight_version: str = "0"
    """Name of the first weights."""
    adapters: AdapterShape | None = None
    """Shape of the adapters that SGLang and vLLM must be able to load; the embedded server loads any."""
