"""Plans the steps of the device: which requests compute which tokens, in which pages of the KV cache."""
