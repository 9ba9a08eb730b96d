"""AReaL's name for joining the tensor dicts of several sequences."""

from areal_lite.api.tensor_dict import concat_padded_tensors

__all__ = ["concat_padded_tensors"]
