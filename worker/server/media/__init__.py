"""Images of requests: read, decoded within limits, and made into tiles for the vision tower."""
