"""The division of a model among ranks, applied from outside to a model that knows nothing of ranks."""
