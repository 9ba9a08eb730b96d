"""Requests to the servers, from a prompt to sampled tokens.

Read engine_client (one model call over aborts, failures and updates), then server_requests (one HTTP request).
"""
