"""Conversations to token ids by a model's chat template, and which of the tokens train."""
