"""The HTTP routes of the embedded server, by topic: generation, control, weights.

Promises that a request that SGLang would refuse never reaches the model. Imports the rest of embedded, and for new
weights ``servers/weights``; ``startup`` puts the routes together. Read http_server, then generation_routes.
"""
