"""Datasets of supervised training: conversations and preference pairs as token sequences."""
