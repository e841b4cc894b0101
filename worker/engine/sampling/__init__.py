"""Sampling: from logits to tokens and logprobs, with sampling parameters of each row."""
