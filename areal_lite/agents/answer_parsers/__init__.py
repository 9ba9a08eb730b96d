"""Parsers for the text of an answer: reasoning, tool calls, and the rest."""
