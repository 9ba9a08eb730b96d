"""HTTP APIs of OpenAI and Anthropic through which an agent reaches its model, in this process or over loopback.

Promises that an agent can generate in its own session and do nothing else. Imports session, and processes for the
check of browsers; ``agent_workflow``, ``ArealOpenAI`` and ``areal-lite serve`` call it. Read agent_service, then the
two doors, http_transport and listener; completions, messages and responses are the APIs, api what they share.
"""
