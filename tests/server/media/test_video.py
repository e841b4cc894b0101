"""Videos within limits, and files that are none."""

from __future__ import annotations

import io

import pytest

av = pytest.importorskip("av", reason="needs PyAV: requirements.lock has it")

from PIL import Image

from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.media import video
from mla_router.worker.server.media.video import NUM_FRAMES, decode_video

FIELD = "messages[0].content[0].video_url"


def written(count: int, container: str = "mp4", size: tuple[int, int] = (32, 32)) -> bytes:
    """Returns a video whose frames become brighter."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream("mpeg4", rate=8)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for index in range(count):
            shade = (index * 200 // count,) * 3
            output.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", size, shade))))
        output.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi"])
def test_containers(container: str) -> None:
    assert len(decode_video(written(5, container), FIELD)) == 5


def test_frames_at_equal_distances() -> None:
    frames = decode_video(written(NUM_FRAMES * 3), FIELD)
    assert len(frames) == NUM_FRAMES
    shades = [frame.resize((1, 1)).getpixel((0, 0)) for frame in frames]
    for index, shade in enumerate(shades):
        assert isinstance(shade, tuple) and abs(shade[0] - index * 200 / NUM_FRAMES) < 12


REFUSED = {
    "text": (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/a.ts\n", "not a video"),
    "a list of files": (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "not a video"),
    "empty": (b"", "not a video"),
    "cut off": (written(20)[:600], "damaged"),
    "a head alone": (b"\0\0\0\x18ftypmp42" + bytes(100), "damaged"),
    "no video": (b"\x1aE\xdf\xa3" + bytes(50), "damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(InvalidField, match=message) as caught:
        decode_video(data, FIELD)
    assert caught.value.body.error.param == FIELD


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("MAX_PIXELS", 1000, "frames have more than 1000 pixels"),
        ("MAX_PACKETS", 9, "has more than 9 frames"),
        ("MAX_SECONDS", 0.0, "takes more than 0 s to decode"),
    ],
)
def test_limits(monkeypatch: pytest.MonkeyPatch, limit: str, value: float, message: str) -> None:
    data = written(10)
    monkeypatch.setattr(video, limit, value)
    with pytest.raises(InvalidField, match=message):
        decode_video(data, FIELD)
