"""Continuous batching: which requests are in the batch, step by step, in a thread of its own.

Guarantees: a request ends exactly once; every token carries the version of the weights that computed it; requests
start in the order they came; between two steps the thread runs commands (abort, pause, new weights), so that they
see no half-done step. All state below belongs to the model thread; others only call ``submit`` and ``command``.

Running requests fill the slots ``[0, running)`` without gaps. The slots behind keep the KV of finished requests:
a prompt that begins like one of these, or like a running one, copies that prefix and computes the rest only. Equal
prompts that wait together are computed once.

