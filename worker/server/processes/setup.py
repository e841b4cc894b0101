"""Process-wide settings of an API process. They must be set before the imports that read them."""

from __future__ import annotations

import logging
import os
import resource
import sys

from mla_router.worker import logs
from mla_router.worker.config import WorkerConfig


def set_up(config: WorkerConfig) -> None:
    # transformers imports torch if it is installed, which takes seconds and 400 MB. This entry hides torch.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    # Prompts are tokenized one by one, so a thread pool only adds switches between threads. The library has no other
    # setting for it.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("transformers").addFilter(_is_news)
    logs.set_up(config.log_level)
    # The usual soft limit of shells, 1024, is too low for connections.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _is_news(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
