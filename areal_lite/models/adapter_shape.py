"""Size of a LoRA adapter, which servers must know before they start. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Facts that a server needs before it loads an adapter."""

    rank: int
    layers: tuple[str, ...]  # last parts of the adapted layers' names, such as ``q_proj``
