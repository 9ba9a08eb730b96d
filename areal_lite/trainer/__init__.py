"""The learning side: a batch in, a new policy version and its metrics out. Loads torch."""
