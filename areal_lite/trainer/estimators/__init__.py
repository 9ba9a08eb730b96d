"""Advantages: how much better each trained token was than what was expected of it."""
