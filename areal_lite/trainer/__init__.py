"""The learning side: samples in, a new policy version and its metrics out. Loads torch."""
