"""Mixtures of experts: `routing` chooses, `experts` computes what was chosen.

For one or two tokens by `gemv`, else over blocks of rows made by `align` in `gemm`; how large the tiles
are says `tiling`.
"""
