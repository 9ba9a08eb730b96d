"""Images and videos in rows: loading, packing and positions of models that see."""
