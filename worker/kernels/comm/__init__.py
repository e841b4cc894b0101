"""Communication between the ranks that share one model."""
