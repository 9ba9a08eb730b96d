"""Tool calls and reasoning in a model's text, by the tokenizer's response template or else by its chat template.

Promises that no text raises, and that tokens are never touched. Imports no other room but errors; the session calls it.
Read answer_parser, then response_template, then tool_formats.
"""
