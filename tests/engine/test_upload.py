"""Arrays keep their types and shapes. What they hold is seen by every test of an engine on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_integers(device: str) -> None:
    """What they are is seen on a CPU, and where they lie elsewhere."""
    upload = Upload(torch.device(device))
    for size in (0, 3, 70, 1):
        columns = [range(-size, 0), [1 << 40] * size, list(range(size)), (7,)]
        got = upload.integers("iqiq", *columns)
        kinds = [torch.int32, torch.int64] * 2
        assert [tensor.dtype for tensor in got] == kinds
        assert [tensor.shape for tensor in got] == [(len(column),) for column in columns]
        assert all(tensor.storage_offset() * tensor.itemsize % 16 == 0 for tensor in got)
        if device == "cpu":
            assert [tensor.tolist() for tensor in got] == [list(column) for column in columns]
    with pytest.raises(ValueError, match="zip"):
        upload.integers("qq", [1])
