"""Supervised training: answers, preference pairs, reward models. Read supervised_trainer."""
