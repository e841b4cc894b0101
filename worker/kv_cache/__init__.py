"""The paged KV cache: the specification of each layer's rows, and their memory."""
