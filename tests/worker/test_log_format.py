from __future__ import annotations

import logging

from mla_router.worker.log_format import RouterFormatter


def test_a_line_has_the_format_of_the_router() -> None:
    record = logging.LogRecord("any", logging.WARNING, "", 0, "%d left", (3,), None)
    record.created = 1_763_948_645.25
    assert RouterFormatter().format(record) == "2025-11-24T01:44:05.250000Z  WARN 3 left"
    record.levelno, record.levelname = logging.INFO, "INFO"
    assert RouterFormatter().format(record) == "2025-11-24T01:44:05.250000Z  INFO 3 left"


def test_a_line_of_a_named_process_has_its_name() -> None:
    record = logging.LogRecord("any", logging.INFO, "", 0, "loaded", (), None)
    assert RouterFormatter("rank 1").format(record).endswith("Z  INFO rank 1: loaded")
