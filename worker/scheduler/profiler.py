"""Traces of the step loop by torch's profiler, in files for chrome://tracing and Perfetto.

A trace is limited in steps and in time, because it stays in memory until it is written. The loop waits while a trace is
written, for seconds if the trace is long.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_router.worker.config import WorkerConfig
from mla_router.worker.messages import Recorded, StartProfile, StopProfile

logger = logging.getLogger(__name__)

MAX_SECONDS = 60.0
_ERRORS = (OSError, RuntimeError)  # of files; of torch


class ProfilerError(Exception):
    """The profiler cannot start or stop now. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class _Recording:
    profile: Any  # torch's
    last_step: int
    ends_at: float  # of `time.monotonic`


class Profiler:
    """Starts, stops and writes traces, as the messages of a server ask."""

    def __init__(self, folder: Path | None, name: str) -> None:
        """Writes traces to `folder`, in files whose names begin with `name`. With None, profiles are refused."""
        self._folder = folder
        self._name = name
        self._recording: _Recording | None = None

    @classmethod
    def from_config(cls, config: WorkerConfig) -> Profiler:
        folder = Path(config.profile_dir) if config.profile_dir else None
        return cls(folder, f"worker-{config.port}")

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    def answer(self, message: StartProfile | StopProfile, now_at: int) -> Recorded:
        """Starts or stops a profile. `now_at`: number of steps so far."""
        try:
            if isinstance(message, StopProfile):
                return Recorded(message.query, file=str(self.stop()))
            self.start(message.num_steps, now_at)
            return Recorded(message.query)
        except (ProfilerError, *_ERRORS) as error:
            failed = isinstance(error, _ERRORS)
            return Recorded(message.query, problem=str(error), failed=failed)

    def start(self, num_steps: int, now_at: int) -> None:
        """Starts to record the next `num_steps` steps. Raises ProfilerError, RuntimeError."""
        if self._folder is None:
            raise ProfilerError("no folder for traces: start the worker with --profile-dir")
        if self._recording is not None:
            raise ProfilerError("a profile is being recorded")
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        started = profile(activities=activities, acc_events=True)
        started.start()
        ends_at = time.monotonic() + MAX_SECONDS
        self._recording = _Recording(started, now_at + num_steps, ends_at)

    def tick(self, now_at: int) -> None:
        """Writes the trace if the profile has reached its last step or its time limit. Call it before each step."""
        if (recording := self._recording) is None:
            return
        if now_at >= recording.last_step or time.monotonic() >= recording.ends_at:
            try:
                logger.info("profile written: %s", self.stop())
            except (ProfilerError, *_ERRORS) as error:
                logger.error("the profile is lost: %s", error)

    def stop(self) -> Path:
        """Stops the profile, writes the trace and returns its file. Raises ProfilerError, OSError, RuntimeError."""
        if self._recording is None or self._folder is None:
            raise ProfilerError("no profile is being recorded")
        profile, self._recording = self._recording.profile, None
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{self._name}-{time.time_ns()}.json.gz"
        try:
            profile.export_chrome_trace(str(file))
        except _ERRORS:  # such as a full disk, which a part of the trace would keep full
            file.unlink(missing_ok=True)
            raise
        return file
