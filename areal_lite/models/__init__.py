"""Decoders: how a model is loaded, adapted, divided among ranks, and computed fast.

lean_decoder and slot_cache serve, fused_decoder trains; both compute what transformers computes, to rounding. May
import ``data`` and what is below; called by ``trainer``, ``embedded`` and ``servers.weights``.
"""
