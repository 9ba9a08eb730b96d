"""What training minimises: losses per token or pair, the weights that sum them, corrections of off-policy data."""
