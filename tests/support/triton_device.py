"""The device on which tests run Triton kernels: the GPU if there is one, else the CPU with Triton's
interpreter (`conftest.py`), which takes float16 and float32 and is silently wrong for bfloat16."""

from __future__ import annotations

import os

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

if DEVICE == "cpu":
    from support.interpreter import make_faster

    make_faster()
