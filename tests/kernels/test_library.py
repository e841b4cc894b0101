"""The choice between cuBLAS and cuBLASLt."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels import library
from mla_router.worker.kernels.library import suits_cublaslt


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "suits"),
    [
        (64, 4096, 14336, False),  # by our own kernel
        (65, 4096, 14336, True),
        (128, 4096, 14336, True),
        (129, 4096, 14336, False),
        (128, 4096, 4096, False),
        (128, 28672, 4096, False),
        (128, 2048, 2816, False),
        (128, 2048, 8192, True),
        (128, 2048, 8184, False),
    ],
)
def test_few_outputs_of_many_inputs(rows: int, outputs: int, inputs: int, suits: bool) -> None:
    assert suits_cublaslt(rows, outputs, inputs) == suits


def test_the_preference_ends_with_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    set_preference = torch.backends.cuda.preferred_blas_library

    def product(*_operands: object) -> torch.Tensor:
        seen.append(set_preference())
        raise RuntimeError("out of memory")

    monkeypatch.setattr(library, "is_hopper", lambda _device: True)
    monkeypatch.setattr(library.functional, "linear", product)
    before = set_preference()
    with pytest.raises(RuntimeError, match="out of memory"):
        library.library_linear(torch.empty(128, 8192), torch.empty(2048, 8192))
    assert seen != [before] and set_preference() == before
