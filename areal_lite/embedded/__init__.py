"""The embedded inference server: a child process that serves a Hugging Face model in SGLang's HTTP dialect.

Importing this package, or ``process`` in it, loads no torch; the child process does.
"""

from areal_lite.embedded.process import EmbeddedServer
from areal_lite.embedded.settings import ServerSettings

__all__ = ["EmbeddedServer", "ServerSettings"]
