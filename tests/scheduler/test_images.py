"""Images before admission: their order, their room on the device, and the batches of the tower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from mla_router.worker.generation import FinishReason, SamplingParams
from mla_router.worker.images import Image, ImageInfo, ImageKind, ImagePart, PlacedImage
from mla_router.worker.messages import Generate
from mla_router.worker.scheduler.images import ImageRequests, layers_within
from mla_router.worker.scheduler.request import Request, State
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import ImageRows
from support.scripted_scheduler import generate

TILE_BYTES, TILES_OF_A_BATCH, ROOM, VOCABULARY = 12, 4, 100, 50


class Batch:
    """A batch of 3 layers of 2 s."""

    layer_s = 2.0

    def __init__(self) -> None:
        self.layers_left = 3
        self.is_done = False

    def done(self) -> bool:
        return self.is_done and not self.layers_left


class Tower:
    """Keeps the images that an engine has, and checks the calls."""

    def __init__(self) -> None:
        self.capacity = Capacity(1, 1, 1, 1, image_tokens=ROOM, image_tiles=TILES_OF_A_BATCH)
        self.tiles: dict[int, bytes] = {}
        self.whole: dict[int, int] = {}  # tokens by key
        self.batches: list[tuple[Batch, tuple[ImagePart, ...]]] = []

    def encode(self, parts: tuple[ImagePart, ...], dropped: tuple[int, ...]) -> Batch:
        assert all(batch.is_done for batch, _ in self.batches), "two batches at a time"
        assert 0 < sum(len(part.tiles) for part in parts) <= TILES_OF_A_BATCH * TILE_BYTES
        for key in dropped:
            self.tiles.pop(key, None)
            self.whole.pop(key, None)
        for part in parts:
            key, wanted = part.info.key, part.info.num_tiles * TILE_BYTES
            assert key not in self.whole, "encoded twice"
            self.tiles[key] = self.tiles.get(key, b"") + part.tiles
            if len(self.tiles[key]) == wanted:
                assert self.tiles.pop(key) == pixels(key, part.info.num_tiles)
                self.whole[key] = part.info.num_tokens
        self.batches.append((Batch(), parts))
        return self.batches[-1][0]

    def encode_layers(self, count: int) -> None:
        batch, _ = self.batches[-1]
        assert 0 < count <= batch.layers_left
        batch.layers_left -= count

    def finish(self) -> None:
        for batch, _ in self.batches:
            batch.is_done = not batch.layers_left


def pixels(key: int, tiles: int) -> bytes:
    return Random(key).randbytes(tiles * TILE_BYTES)


def image(number: int, *, tiles: int = 1, tokens: int = 10) -> Image:
    key = VOCABULARY + number
    info = ImageInfo(key, ImageKind.TILED, tokens, tiles, 9, 9, 1.0, (0, 0, 0), (1, 1, 1))
    return Image(info, pixels(key, tiles))


def request(rid: str, *images: Image) -> Request:
    prompt, placed = [1], []
    for one in images:
        placed.append(PlacedImage(one, len(prompt)))
        prompt += [7] * one.info.num_tokens + [2]
    return Request(generate(rid, prompt, 3, images=placed))


@pytest.fixture
def tower() -> Tower:
    return Tower()


@pytest.fixture
def images(tower: Tower) -> ImageRequests:
    engine: Any = tower
    return ImageRequests(engine)


def run(images: ImageRequests, tower: Tower, turns: int = 20) -> list[str]:
    """Returns the requests in the order in which their images are encoded."""
    ready = []
    for _ in range(turns):
        ready += [request.rid for request in images.advance(math.inf)]
        tower.finish()
    return ready


def end(images: ImageRequests, *requests: Request) -> None:
    for one in requests:
        one.finish(FinishReason.ABORT)
        images.remove(one)


def test_an_image_is_encoded_once(images: ImageRequests, tower: Tower) -> None:
    first, second = request("a", image(0)), request("b", image(0), image(0))
    images.add(first)
    assert run(images, tower) == ["a"]
    images.add(second)
    assert run(images, tower) == ["b"]
    assert len(tower.batches) == 1


def test_a_batch_has_tiles_of_several_requests(images: ImageRequests, tower: Tower) -> None:
    for rid, tiles in (("a", 6), ("b", 1), ("c", 2)):
        images.add(request(rid, image(ord(rid), tiles=tiles)))
    assert run(images, tower) == ["a", "b", "c"]
    sizes = [[len(part.tiles) // TILE_BYTES for part in parts] for _, parts in tower.batches]
    assert sizes == [[4], [2, 1, 1], [1]]


def test_the_next_batch_waits_for_the_one_before(images: ImageRequests, tower: Tower) -> None:
    images.add(request("a", image(0, tiles=9)))
    for _ in range(5):
        assert images.advance(math.inf) == []
    assert len(tower.batches) == 1
    assert run(images, tower) == ["a"]


def test_a_batch_is_launched_in_pieces(images: ImageRequests, tower: Tower) -> None:
    """A piece takes the given time, but has a layer at least."""
    images.add(request("a", image(0, tiles=4)))
    for seconds, left, launched_s in ((5.0, 1, 4.0), (0.1, 0, 2.0), (5.0, 0, 0.0)):
        assert images.advance(seconds) == []
        assert tower.batches[0][0].layers_left == left
        assert images.take_launched_s() == launched_s
    assert len(tower.batches) == 1
    assert run(images, tower) == ["a"]


def test_layers_of_unknown_time_are_launched_one_by_one() -> None:
    batch = Batch()
    batch.layer_s = 0.0
    assert layers_within(5.0, batch) == 1


def test_images_of_running_requests_stay(images: ImageRequests, tower: Tower) -> None:
    """There is room for two images of 40 tokens. The third waits for the end of a request, and the image of the
    request that has ended is dropped."""
    running = [request(rid, image(n, tokens=40)) for n, rid in enumerate("ab")]
    for one in running:
        images.add(one)
    assert run(images, tower) == ["a", "b"]
    images.add(request("c", image(2, tokens=40)))
    assert run(images, tower) == []
    end(images, running[1])
    assert run(images, tower) == ["c"]
    assert set(tower.whole) == {VOCABULARY, VOCABULARY + 2}


def test_a_request_with_more_than_all_room(images: ImageRequests, tower: Tower) -> None:
    small, large = request("a", image(0)), request("b", image(1, tokens=ROOM + 1))
    images.add(small)
    assert run(images, tower) == ["a"]
    images.add(large)
    assert run(images, tower) == []
    end(images, small)
    assert run(images, tower) == ["b"]
    assert set(tower.whole) == {VOCABULARY + 1}


def test_random_arrivals_and_ends(tower: Tower, images: ImageRequests) -> None:
    draw = Random(1)
    waiting: dict[str, Request] = {}
    running: dict[str, Request] = {}
    for number in range(400):
        some = [
            image(n, tiles=n % 7 + 1, tokens=n % 5 * 9 + 1)
            for n in draw.choices(range(12), k=draw.randint(1, 3))
        ]
        waiting[str(number)] = one = request(str(number), *some)
        images.add(one)
        for _ in range(draw.randint(0, 3)):
            for ready in images.advance(math.inf):
                running[ready.rid] = waiting.pop(ready.rid)
            if draw.random() < 0.7:
                tower.finish()
        for held in running.values():
            assert all(placed.image.info.key in tower.whole for placed in held.images)
        for pool in (running, waiting):
            for rid in [rid for rid in pool if draw.random() < 0.2]:
                end(images, pool.pop(rid))
    end(images, *running.values())
    for _ in range(200):
        for ready in images.advance(math.inf):
            end(images, waiting.pop(ready.rid))
        tower.finish()
    assert not waiting and len(images) == 0


def test_an_error_ends_the_requests_that_are_being_encoded(
    images: ImageRequests, tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.add(request("a", image(0)))
    with monkeypatch.context() as patch:
        patch.setattr(tower, "encode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            images.advance(math.inf)
    assert [failed.rid for failed in images.fail()] == ["a"]
    images.add(request("b", image(0)))
    assert run(images, tower) == ["b"]


def test_chunks_name_the_rows_of_images() -> None:
    one = request("a", image(0, tokens=4), image(1, tokens=3))
    assert one.state is State.ENCODING
    keys = [VOCABULARY] * 4 + [2] + [VOCABULARY + 1] * 3
    assert one.prompt == [1, *keys, 2]
    one.state = State.PREFILL
    chunks = [one.take_chunk(4), one.take_chunk(4), one.take_chunk(4)]
    assert [chunk.tokens for chunk in chunks] == [(1, 7, 7, 7), (7, 2, 7, 7), (7, 2)]
    assert [chunk.images for chunk in chunks] == [
        (ImageRows(1, VOCABULARY, 0, 3),),
        (ImageRows(0, VOCABULARY, 3, 1), ImageRows(2, VOCABULARY + 1, 0, 2)),
        (ImageRows(0, VOCABULARY + 1, 2, 1),),
    ]


def placed_at(*starts: int) -> Generate:
    placed = [PlacedImage(image(n, tokens=3), start) for n, start in enumerate(starts)]
    return Generate("a", [7] * 8, SamplingParams(max_tokens=1), images=placed)


@pytest.mark.parametrize(
    ("starts", "fits"),
    [((0, 3), True), ((1, 5), True), ((0, 2), False), ((6,), False), ((-1,), False)],
)
def test_places_outside_of_the_prompt(
    images: ImageRequests, starts: Sequence[int], fits: bool
) -> None:
    assert images.can_take(placed_at(*starts)) is fits


@pytest.mark.parametrize(("room", "takes"), [(0, False), (1, True)])
def test_a_model_with_any_room_for_images_takes_them(tower: Tower, room: int, takes: bool) -> None:
    """Images larger than the room get it alone."""
    tower.capacity = replace(tower.capacity, image_tokens=room)
    engine: Any = tower
    images = ImageRequests(engine)
    assert images.can_take(placed_at(0)) is takes
    if takes:
        images.add(request("a", image(0)))
        assert run(images, tower) == ["a"]
