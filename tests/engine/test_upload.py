"""Uploaded arrays keep their types and shapes. The tests of an engine on a GPU check their values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mla_router.worker.engine.upload import Upload

KINDS = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


def test_types_and_shapes() -> None:
    """First an empty upload, without a buffer; then a larger and a smaller one."""
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
    """The values are checked on a CPU, the offsets on a meta device."""
    upload = Upload(torch.device(device))
    for size in (0, 3, 70, 1):
        columns = [range(-size, 0), [1 << 40] * size, list(range(size)), bytes(range(size)), (7,)]
        got = upload.integers("iqibq", *columns)
        kinds = [torch.int32, torch.int64, torch.int32, torch.int8, torch.int64]
        assert [tensor.dtype for tensor in got] == kinds
        assert [tensor.shape for tensor in got] == [(len(column),) for column in columns]
        assert all(tensor.storage_offset() * tensor.itemsize % 16 == 0 for tensor in got)
        if device == "cpu":
            assert [tensor.tolist() for tensor in got] == [list(column) for column in columns]
    with pytest.raises(ValueError, match="zip"):
        upload.integers("qq", [1])
