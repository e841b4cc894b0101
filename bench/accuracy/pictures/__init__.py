"""Picture tasks of a small model: pictures that are drawn at random, a question about each, and its answer."""
