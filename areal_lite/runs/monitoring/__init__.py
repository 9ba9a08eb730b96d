"""What a run shows of itself: metrics, progress on the console, profiles."""
