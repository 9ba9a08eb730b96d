"""One agent's conversation: requests in, sampled tokens recorded, each history continued without tokenizing it again.

Read chat_session, then chat_request and chat_renderer.
"""
