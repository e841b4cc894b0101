"""The paged KV cache: the rows that each layer keeps, and their memory."""
