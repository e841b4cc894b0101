"""Mixtures of experts: `routing` chooses, `experts` computes what was chosen.

For one or two tokens by `gemv`, else over blocks of rows made by `align`, in `gate_up_gemm` and `down_gemm`: which
program has which tile say `gemm_programs`, and how large tiles are `tiling`.
"""
