"""HTTP APIs of OpenAI, Anthropic and Gemini, through which an agent reaches its model in this process or over loopback.

Promises that an agent can generate in its own session and do nothing else. Imports session, and processes for the
check of browsers; ``agent_workflow``, ``ArealOpenAI`` and ``areal-lite serve`` call it. Read agent_service, then the
doors, http_transport and listener; completions, messages, responses and generate_content are the APIs, api their base.
"""
