"""Where tests run Triton kernels: on the GPU, or where there is none on the CPU, in Triton's
interpreter (`conftest.py`), which takes float16 and float32 and is silently wrong for bfloat16."""

from __future__ import annotations

import os

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
