"""Quantized weights: the quantization_config of a checkpoint, and weight formats.

Model files do not depend on them: `quantize` gives linear layers another format.
"""
