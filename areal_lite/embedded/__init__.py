"""The embedded inference server: a child process that serves a Hugging Face model in SGLang's HTTP dialect.

Promises SGLang's replies and errors, the version of the weights with every token, and an answer that depends only on
prompt, weights and seed. Imports config, files, models, processes and servers; importing this package loads no torch.
``servers/programs`` starts it, and ``areal-lite serve`` with OpenAI's API on top. Read startup, then model_thread,
scheduler, model_runner with ``decoder/``, and sampling; routes is what a client sees.
"""
