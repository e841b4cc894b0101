"""Every loaded kernel has the same division of on-chip memory."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator

import pytest
from triton import knobs

from mla_router.worker.kernels import carveout
from mla_router.worker.kernels.carveout import prefer_shared_memory


class Driver:
    """The calls of libcuda that are used."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[int | None, int, int]] = []

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
        self.calls.append((function.value, attribute, value))
        return self.code


@pytest.fixture(autouse=True)
def _hook_removed() -> Iterator[None]:
    yield
    knobs.runtime.kernel_load_end_hook.remove(carveout._prefer)


@pytest.mark.parametrize("code", [0, 801])
def test_once_for_each_kernel_that_is_loaded(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(code)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    prefer_shared_memory()
    prefer_shared_memory()
    with caplog.at_level(logging.WARNING):
        knobs.runtime.kernel_load_end_hook(object(), 1 << 40, "attend_kernel", None, "hash")
    assert driver.calls == [(1 << 40, 9, 100)]
    assert ("attend_kernel" in caplog.text and "801" in caplog.text) == bool(code)
