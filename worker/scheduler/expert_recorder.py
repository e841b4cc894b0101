"""Records of the load of routed experts, in files for --init-expert-location.

The device counts all the time. A record is the difference of the counts at its two ends.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

import msgspec

from mla_router.worker.config import WorkerConfig
from mla_router.worker.messages import Recorded, RecordExperts

Counts = list[list[int]]  # of pairs, [layers][experts]


class Load(Protocol):
    """The counts of pairs on the device (`ExpertLoad`)."""

    def read(self) -> Counts: ...

    def balancedness(self) -> float: ...


class RecorderError(Exception):
    """No record can be started, stopped or written now. The message gives the reason."""


class ExpertRecorder:
    """Starts, stops and writes records, as the messages of a server ask."""

    def __init__(self, load: Load | None, folder: Path | None, name: str) -> None:
        """`load`: None if nothing is counted. Writes to `folder`, in files whose names have `name` in them. With None,
        files are refused."""
        self._load = load
        self._folder = folder
        self._name = name
        self._begin: Counts | None = None
        self._end: Counts | None = None

    @classmethod
    def from_config(cls, config: WorkerConfig, load: Load | None) -> ExpertRecorder:
        folder = config.expert_distribution_recorder_dir
        return cls(load, Path(folder) if folder else None, f"worker-{config.port}")

    def balancedness(self) -> float:
        """Returns the balancedness of the last second or so; 0 if it is not known."""
        return 0.0 if self._load is None else self._load.balancedness()

    def answer(self, message: RecordExperts) -> Recorded:
        try:
            return Recorded(message.query, file=self._do(message.action))
        except (RecorderError, OSError) as error:
            failed = isinstance(error, OSError)
            return Recorded(message.query, problem=str(error), failed=failed)

    def _do(self, action: str) -> str:
        """Returns the written file, or "". Raises RecorderError, OSError."""
        if self._load is None:
            raise RecorderError(
                "nothing is counted: start the worker with --enable-expert-distribution-metrics"
            )
        if action == "start":
            self._begin, self._end = self._load.read(), None
            return ""
        if self._begin is None:
            raise RecorderError("there is no record: call /start_expert_distribution_record")
        if action == "stop":
            self._end = self._end or self._load.read()
            return ""
        return str(self._write(self._begin, self._end or self._load.read()))

    def _write(self, begin: Counts, end: Counts) -> Path:
        if self._folder is None:
            raise RecorderError(
                "no folder for records: start the worker with --expert-distribution-recorder-dir"
            )
        counts = [
            [after - before for after, before in zip(*rows, strict=True)]
            for rows in zip(end, begin, strict=True)
        ]
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"expert_distribution_recorder_{self._name}_{time.time_ns()}.json"
        try:
            file.write_bytes(msgspec.json.encode({"logical_count": counts}))
        except OSError:  # such as a full disk, which a part of the record would keep full
            file.unlink(missing_ok=True)
            raise
        return file
