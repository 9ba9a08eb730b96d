"""How an agent reaches its model: OpenAI's and Anthropic's APIs, in this process or over loopback.

Promises that an agent can generate in its own session and do nothing else. Read agent_service, then the two doors,
http_transport and listener; completions, messages and responses are the APIs.
"""
