"""Attention backends: they plan a step and launch the kernels of `model/attention.py`."""
