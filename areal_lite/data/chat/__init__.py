"""Messages, prompts and tokens: everything that asks a tokenizer or a chat template."""
