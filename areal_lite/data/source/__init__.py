"""What a rollout draws from: rows as groups of samples, with a position that can be saved and resumed."""
