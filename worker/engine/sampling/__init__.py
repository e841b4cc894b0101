"""From logits to tokens and their logprobs, for batches in which every row has its own settings."""
