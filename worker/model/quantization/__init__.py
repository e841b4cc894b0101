"""Weights in fewer bits: what a checkpoint says of itself, and the formats of such weights.

Model files know nothing of it: `quantize` gives their linear layers another format.
"""
