"""The HTTP routes of the embedded server, by topic: generation, control, weights. Read http_server."""
