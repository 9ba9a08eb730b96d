"""The embedded inference server: a child process that serves a Hugging Face model in SGLang's HTTP dialect.

Importing this package loads no torch; only the child process does.
"""
