"""Runners: each runs steps kernel by kernel or as captured CUDA graphs. `choose.py` selects the runner of a step."""
