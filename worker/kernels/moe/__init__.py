"""Mixtures of experts: `routing` chooses experts, `experts` computes them.

One or two tokens go to `gemv`. More tokens are sorted into blocks of rows (`align`) for `gate_up_gemm` and `down_gemm`.
`gemm_programs` maps programs to tiles, `tiling` has the sizes of tiles.
"""
