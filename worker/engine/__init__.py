"""Runs one forward step on the device: inputs, page tables, CUDA graphs, sampling."""
