"""``areal-lite serve``: servers without a run, with OpenAI's API on the embedded one; or a run with agents outside.

serve starts the servers as a run does (``servers/programs``) and keeps them until a signal. openai_server is the
program of an embedded one: the APIs of ``agents/doors`` in the server's own process, without a run's recorded sessions.
"""
