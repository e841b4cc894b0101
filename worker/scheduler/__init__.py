"""Which request computes what in which step, and where its KV cache lies."""
