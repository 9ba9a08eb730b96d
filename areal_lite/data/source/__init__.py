"""Which rows a rollout gets next, and which it still owes. Read rollout_data_source."""
