"""Images and videos in rows: loading, packing and token positions."""
