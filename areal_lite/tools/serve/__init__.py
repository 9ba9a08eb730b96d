"""``areal-lite serve``: the servers of a config without a run, with OpenAI's API on the embedded one.

serve starts the servers as a run does (``servers/programs``) and keeps them until a signal. openai_server is the
program of an embedded one: the APIs of ``agents/doors`` in the server's own process, without sessions that a run
records.
"""
