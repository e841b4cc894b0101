"""Decodes frames of a video by PyAV, within limits.

The demuxer follows from the first bytes of the file, and is not found by probing: FFmpeg has formats that name other files
and URLs.
"""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING

from mla_router.worker.server.errors import InvalidField

if TYPE_CHECKING:
    from PIL.Image import Image

NUM_FRAMES = 32  # kept of each video, at equal distances, as in the model's training
MAX_PIXELS = 1 << 22  # of a frame
MAX_PACKETS = 1 << 14  # frames of the file: nine minutes at 30 a second
MAX_SECONDS = 20.0  # of decoding


def decode_video(data: bytes, field: str) -> list[Image]:
    """Returns at most NUM_FRAMES frames in RGB. Raises InvalidField; ImportError without PyAV."""
    import av

    container = _container(data)
    if container is None:
        raise InvalidField(field, "not a video; supported are MP4, WebM, Matroska and AVI")
    deadline = time.monotonic() + MAX_SECONDS
    try:
        wanted = _wanted(_count(data, container, field))
        frames: list[Image] = []
        with av.open(io.BytesIO(data), mode="r", format=container) as file:
            for index, frame in enumerate(file.decode(video=0)):
                if frame.width * frame.height > MAX_PIXELS:
                    raise InvalidField(field, f"frames have more than {MAX_PIXELS} pixels")
                if index in wanted:
                    frames.append(frame.to_image())
                if len(frames) == len(wanted):
                    break
                if time.monotonic() > deadline:
                    raise InvalidField(field, f"takes more than {MAX_SECONDS:g} s to decode")
    except InvalidField:
        raise
    except Exception:  # noqa: BLE001 (FFmpeg's errors have many types)
        raise InvalidField(field, "the video is damaged or has an unknown codec") from None
    if not frames:
        raise InvalidField(field, "the video has no frames")
    return frames


def _container(data: bytes) -> str | None:
    """Returns FFmpeg's name of the file's format, by its first bytes."""
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    return None


def _count(data: bytes, container: str, field: str) -> int:
    """Returns the number of frames, without decoding them. Raises InvalidField if the first stream is too large."""
    import av

    with av.open(io.BytesIO(data), mode="r", format=container) as file:
        stream = file.streams.video[0]
        if stream.codec_context.width * stream.codec_context.height > MAX_PIXELS:
            raise InvalidField(field, f"frames have more than {MAX_PIXELS} pixels")
        count = 0
        for packet in file.demux(stream):
            count += packet.size > 0
            if count > MAX_PACKETS:
                raise InvalidField(field, f"has more than {MAX_PACKETS} frames")
        return count


def _wanted(count: int) -> frozenset[int]:
    """Returns the indices of the kept frames, as in transformers' `sample_frames`."""
    kept = min(count, NUM_FRAMES)
    return frozenset(int(index * count / kept) for index in range(kept))
