"""From a row to a prompt and from episodes to a training batch, by one class that users may replace."""
