"""Conversations to token ids by a model's chat template, and which of the tokens train.

Promises the template's own ids: prompts in prompt_encoder, whole conversations with a mask in chat_tokens, which reads
chat_template first; hermes_tools writes tools for templates that do not know them. Imports ``config`` and ``files``;
called by the other rooms of ``data``, ``agents.session`` and ``runs``.
"""
