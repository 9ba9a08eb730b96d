"""The embedded server's forward pass: a KV cache of slots, and a lean decoder over it with its kernels.

Promises that lean_decoder computes what transformers computes, to rounding, for any number of tokens of any slots. May
import ``models``; called by ``model_runner``. Read slot_cache, lean_decoder, then lean_decoder_kernels.
"""
