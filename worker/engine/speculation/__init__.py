"""Drafters of speculative decoding. The steps of the engine verify the drafts (`kernels/sampling/accept.py`)."""
