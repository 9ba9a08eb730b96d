"""Messages, prompts and tokens: everything that uses a tokenizer or a chat template."""
