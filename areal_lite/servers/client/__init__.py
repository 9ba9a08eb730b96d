"""Requests to the servers, from a prompt to sampled tokens.

Promises that an answer has each of its tokens once, with its server's log-prob and version, whatever servers do
meanwhile. Imports pool, dialects and weights; called by ``rollout``. Read engine_client (one model call over aborts,
failures and updates), then answer (its tokens so far), request_sender (one generation call over servers that fail),
server_requests (one HTTP request) and connections (its bytes).
"""
