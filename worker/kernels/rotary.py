"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864).

DeepSeek rotates neighbouring pairs (x0, x1), (x2, x3), ...; Llama's checkpoints, as Hugging Face has
them, and a few conversions of DeepSeek's rotate (x0, x_{R/2}), (x1, x_{R/2+1}), ... instead. Either
way the result keeps the input's layout, and queries and keys share it, so that their dot products do
not depend on the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(q: Tensor, k: Tensor, rotations: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Turn each pair of every head by its token's angle.

    q [T, H, R], k [T, G, R], rotations [T, R/2] complex64: what `model/rope.py` says for the position
    of each token. With `interleaved` pairs are neighbours. The arithmetic is float32; results have the
    inputs' shapes and dtypes.
    """
    tokens, _, width = q.shape
    assert k.shape[::2] == (tokens, width) and rotations.shape == (tokens, width // 2), (
        f"q {tuple(q.shape)}, k {tuple(k.shape)}, rotations {tuple(rotations.shape)}"
    )
    turn = _turn_neighbours if interleaved else _turn_halves
    return turn(q, rotations[:, None]), turn(k, rotations[:, None])


def _turn_neighbours(x: Tensor, rotations: Tensor) -> Tensor:
    wide = x.float()
    pairs = torch.complex(wide[..., 0::2], wide[..., 1::2]) * rotations
    return torch.view_as_real(pairs).flatten(-2).to(x.dtype)


def _turn_halves(x: Tensor, rotations: Tensor) -> Tensor:
    pairs = torch.complex(*x.float().chunk(2, dim=-1)) * rotations
    return torch.cat((pairs.real, pairs.imag), dim=-1).to(x.dtype)
