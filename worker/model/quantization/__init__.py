"""Weights in fewer bits: what a checkpoint says of itself, and the layers that take such weights.

Model files know nothing of it: `quantize` puts other layers in the place of theirs.
"""
