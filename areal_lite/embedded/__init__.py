"""The embedded inference server: a child process that serves a Hugging Face model in SGLang's HTTP dialect.

Importing this package loads no torch; only the child process does.
"""

from areal_lite.embedded.process import EmbeddedServer

__all__ = ["EmbeddedServer"]
