"""``areal-lite view``: dumps and metrics as a page in the browser."""
