"""The HTTP APIs that agents speak, each a pair of functions around :class:`ChatRequest` and :class:`Answer`."""
