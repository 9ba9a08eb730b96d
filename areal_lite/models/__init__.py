"""Decoders: how a model is loaded, adapted, divided among ranks, and computed fast.

Promises that fused_decoder, which trains, computes what transformers computes, to rounding; the one that serves is in
``embedded/decoder``, on the same decoder_family. May import ``data`` and below; called by ``trainer``, ``embedded`` and
``servers.weights``. Read policy_model, decoder_family, fused_decoder, lora, ``parallel/``, ``kernels/``.
"""
