"""What a server process sets once, before it imports what reads it."""

from __future__ import annotations

import logging
import os
import sys

from mla_router.worker import logs
from mla_router.worker.config import WorkerConfig


def set_up(config: WorkerConfig) -> None:
    # This process never computes. transformers would import torch because it is there, which
    # takes seconds and 400 MB; None in this place says that it is not.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    # Prompts are tokenized one by one: a pool of threads would only add a switch to it and back. The
    # library reads this itself, and has no other switch.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("transformers").addFilter(_is_news)
    logs.set_up(config.log_level)


def _is_news(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
