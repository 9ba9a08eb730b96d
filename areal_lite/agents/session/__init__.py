"""One agent's conversation: requests in, sampled tokens recorded, each history continued without tokenizing it again.

Promises that a sampled token is never tokenized again. Imports parsers, api, config and ``data/chat``. The doors call
it with a checked :class:`ChatRequest`; it calls the engine. Read chat_session, then chat_history, whose page says how a
history is matched, then chat_answer and chat_renderer; chat_request and request_options are what is checked at a door.
"""
