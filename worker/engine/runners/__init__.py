"""How a step runs on the device: kernel by kernel, or as captured CUDA graphs. `choose.py` says which."""
