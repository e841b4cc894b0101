"""Arrays keep their types and shapes. What they hold is seen by every test of an engine on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from mla_router.worker.engine.upload import Upload

KINDS = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


def test_types_and_shapes() -> None:
    """Of nothing at all, first: there is no buffer yet. Then of more than before, and of less."""
    upload = Upload(torch.device("meta"))
    for size in (0, 3, 70, 1):
        arrays = [np.zeros(size, kind) for kind in KINDS]
        arrays += [np.zeros((3, size), kind)[:, ::2] for kind in KINDS]
        got = upload(arrays)
        assert [tensor.shape for tensor in got] == [array.shape for array in arrays]
        assert [tensor.dtype for tensor in got] == [*KINDS.values()] * 2
        assert all(tensor.is_contiguous() for tensor in got)
        assert all(tensor.storage_offset() * tensor.itemsize % 16 == 0 for tensor in got)
