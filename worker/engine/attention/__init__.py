"""Attention backends: the kernels behind `model/attention.py`, and what they know of a step."""
