"""From a row to a workflow's input and from episodes to a training batch, by one class that users may replace.

Promises that recorded tokens are never tokenized again. Read data_packer (the hooks), then decoder_only_llm_packer,
the default. Imports ``data.chat``, ``data.batch`` and slime's ``Sample``; called by ``data.source`` and ``runs``.
"""
