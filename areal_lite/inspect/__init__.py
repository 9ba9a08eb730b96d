"""Looking at what a run wrote: its dumps in the terminal, its metrics as a picture."""
