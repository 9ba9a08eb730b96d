"""One class for each prefix of ``env: PREFIX:NAME``, around a library, a server's protocol or a format of tasks.

Promises that each library is imported only when its prefix is used. Imports the environments' protocol; ``catalog``
finds the classes by name. Read reasoning_gym (one answer), textarena (several players), mcp (tools).
"""
