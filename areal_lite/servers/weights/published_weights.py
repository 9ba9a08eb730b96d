"""A published version of the policy's weights. Each way in which servers take weights has its class here. A publisher
makes one beside the trainer, and the weight loader has every server load it, some of them later."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from areal_lite.config.trainer_config import AdapterShape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """A folder that servers read: a checkpoint, or in peft's format adapters of the model that they started with."""

    path: str
    version: int
    adapters: AdapterShape | None = None

    def __str__(self) -> str:
        return f"{'' if self.adapters is None else 'the adapters of '}policy version {self.version} from {self.path}"


@dataclass(frozen=True, slots=True, eq=False)
class WeightBroadcast:
    """A copy of the weights that the trainer sends to each server over a process group of the two."""

    version: int
    buckets: "Sequence[WeightBucket]"
    sender: Any  # the broadcaster that made it

    def __str__(self) -> str:
        return f"policy version {self.version} by broadcast"


@dataclass(frozen=True, slots=True, eq=False)
class WeightBucket:
    """Tensors that are sent together, in this order."""

    tensors: "Mapping[str, Tensor]"

    def description(self) -> dict[str, Any]:
        """Return names, dtypes and shapes, as SGLang's protocol has them."""
        return {
            "names": list(self.tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()],
            "shapes": [list(tensor.shape) for tensor in self.tensors.values()],
        }


PublishedWeights = WeightFolder | WeightBroadcast
