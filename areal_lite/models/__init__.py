"""Decoders: how a model is loaded, adapted, divided among ranks, and computed fast.

Promises that lean_decoder, which serves, and fused_decoder, which trains, compute what transformers computes, to
rounding. May import ``data`` and what is below; called by ``trainer``, ``embedded`` and ``servers.weights``. Read
policy_model, decoder_family and fused_decoder; then lora, ``parallel/`` and ``kernels/``.
"""
