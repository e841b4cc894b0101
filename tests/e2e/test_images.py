"""Images over HTTP: tokens and logprobs of transformers, for one image and several, with and without cached prefixes."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import urllib.error
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

pytest.importorskip("PIL", reason="needs Pillow: requirements.lock has it")
av = pytest.importorskip("av", reason="needs PyAV: requirements.lock has it")

from PIL import Image

from support import client, processes
from support.processes import Flag, Running, post_json
from support.tiny_llava import (
    IMAGE,
    VIDEO,
    Answer,
    LlavaReference,
    llava_tokenizer,
    write_tiny_llava,
)

TOLERANCE = 1e-4  # of a logprob
NEW_TOKENS = 12
# (width, height)
SIZES = [(42, 42), (55, 90), (301, 17), (5, 160), (128, 128)]
# Ranks that divide the model, and prompts that are cut within images
CUT: dict[str, Flag] = {"page_size": 1, "tp_size": 2, "chunked_prefill_size": 7}
WHOLE: dict[str, Flag] = {"page_size": 16, "disable_overlap_schedule": True}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Returns smooth colours with an edge, so that resizing has work to do."""
    draw = np.random.default_rng(seed)
    corners = Image.fromarray(draw.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    return corners.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, format)
    return base64.b64encode(file.getvalue()).decode()


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + encoded(image)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    write_tiny_llava(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlavaReference:
    return LlavaReference(folder)


@pytest.fixture(scope="module", params=[CUT, pytest.param(WHOLE, marks=pytest.mark.slow)])
def flags(request: pytest.FixtureRequest) -> dict[str, Flag]:
    chosen: dict[str, Flag] = request.param
    return chosen


@pytest.fixture(scope="module")
def worker(folder: Path, flags: dict[str, Flag]) -> Iterator[Running]:
    with processes.worker(folder, **flags) as running:
        yield running


def cached(tokens: int, flags: dict[str, Flag]) -> int:
    """Returns the tokens of a prompt that a second request finds in the cache: the last one is always computed."""
    page = int(str(flags["page_size"]))
    return (tokens - 1) // page * page


def ids(text: str) -> list[int]:
    found: list[int] = llava_tokenizer()(text)["input_ids"]
    return found


def ask(
    url: str, tokens: list[int], images: list[Image.Image], videos: Sequence[bytes] = ()
) -> client.Answer:
    async def run() -> client.Answer:
        async with client.session() as http:
            fields: dict[str, Any] = {"return_logprob": True}
            if images:
                fields["image_data"] = [encoded(image) for image in images]
            if videos:
                fields["video_data"] = [base64.b64encode(data).decode() for data in videos]
            return await client.generate(http, url, tokens, NEW_TOKENS, **fields)

    return asyncio.run(run())


def check(case: str, got: client.Answer, wanted: Answer) -> None:
    assert got.status == 200, f"{case}: {got.body}"
    assert got.prompt_tokens == len(wanted.prompt), case
    assert got.tokens == wanted.tokens, case
    worst = max(abs(a - b) for a, b in zip(got.logprobs, wanted.logprobs, strict=True))
    assert worst <= TOLERANCE, f"{case}: logprob off by {worst:.2e}"


CASES: dict[str, tuple[str, list[Image.Image]]] = {
    **{
        f"{width} x {height}": (f"a{IMAGE}what is it?", [picture(width, height)])
        for width, height in SIZES
    },
    "five": (
        "first".join([IMAGE] * 5) + " and then?",
        [picture(*size, seed) for seed, size in enumerate(SIZES)],
    ),
    "one twice": (f"{IMAGE}{IMAGE}same?", [picture(60, 50), picture(60, 50)]),
    "text": ("only text", []),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_are_those_of_transformers(
    worker: Running, flags: dict[str, Flag], reference: LlavaReference, case: str
) -> None:
    text, images = CASES[case]
    wanted = reference.answer(ids(text), images, NEW_TOKENS)
    check(case, ask(worker.url, ids(text), images), wanted)
    again = ask(worker.url, ids(text), images)
    check(f"{case} again", again, wanted)
    assert again.cached_tokens == cached(len(wanted.prompt), flags), case


def test_many_at_once_are_not_mixed_up(worker: Running, reference: LlavaReference) -> None:
    """Twelve images of one size, with one text."""
    text = f"{IMAGE}what?"
    images = [picture(70, 50, seed) for seed in range(100, 112)]
    wanted = [reference.answer(ids(text), [image], NEW_TOKENS) for image in images]
    assert len({tuple(answer.tokens) for answer in wanted}) > 3
    with ThreadPoolExecutor(len(images)) as pool:
        answers = list(pool.map(lambda image: ask(worker.url, ids(text), [image]), images))
    for got, answer in zip(answers, wanted, strict=True):
        check("many", got, answer)


def chat(worker: Running, parts: Any) -> Any:
    with openai.OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as api:
        return api.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": parts}],
            max_tokens=NEW_TOKENS,
            temperature=0,
            logprobs=True,
            extra_body={"ignore_eos": True},
        )


def test_a_chat_by_the_openai_client(
    worker: Running, flags: dict[str, Flag], reference: LlavaReference
) -> None:
    image = picture(90, 61, 7)
    parts: Any = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": data_url(image), "detail": "auto"}},
    ]
    answers = [chat(worker, parts) for _ in range(2)]
    prompt = ids(f"<|user|>{IMAGE}\nWhat is it?<|assistant|>")
    wanted = reference.answer(prompt, [image], NEW_TOKENS)
    for answer in answers:
        scores = answer.choices[0].logprobs
        assert scores is not None and scores.content is not None and answer.usage is not None
        assert answer.usage.prompt_tokens == len(wanted.prompt)
        got = [entry.logprob for entry in scores.content]
        assert got == pytest.approx(wanted.logprobs, abs=TOLERANCE)
    details = answers[1].usage and answers[1].usage.prompt_tokens_details
    assert details is not None and details.cached_tokens == cached(len(wanted.prompt), flags)


def test_tokenize_gives_the_prompt_of_a_chat(worker: Running) -> None:
    """A picture with several tiles, then two pictures and a video of two frames."""
    tall, film = data_url(picture(55, 90)), video([picture(64, 48, seed) for seed in range(2)])
    frames = {"url": "data:video/mp4;base64," + base64.b64encode(film).decode()}
    one: list[Any] = [
        {"type": "image_url", "image_url": {"url": tall}},
        {"type": "text", "text": "What is it?"},
    ]
    for parts in (one, [*one, one[0], {"type": "video_url", "video_url": frames}]):
        messages = [{"role": "user", "content": parts}]
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        prompt = post_json(worker.url + "/v1/chat/completions", body)["prompt_token_ids"]
        found = post_json(
            worker.url + "/tokenize", {"messages": messages, "return_token_strs": True}
        )
        assert found["tokens"] == prompt
        assert found["count"] == len(prompt) == len(found["token_strs"])
    broken = {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}
    refused = {"messages": [{"role": "user", "content": [broken]}]}
    with pytest.raises(urllib.error.HTTPError) as caught:
        post_json(worker.url + "/tokenize", refused)
    assert caught.value.code == 400
    assert json.load(caught.value)["error"]["param"] == "messages[0].content[0].image_url"


def test_the_responses_api(worker: Running) -> None:
    """An `input_image` is the same as an `image_url` in a chat."""
    image = data_url(picture(80, 31, 8))
    parts: Any = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": image, "detail": "auto"},
    ]
    same = chat(
        worker,
        [
            {"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": image}},
        ],
    )
    with openai.OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as api:

        def respond(content: Any) -> Any:
            return api.responses.create(
                model="default",
                input=[{"role": "user", "content": content}],
                max_output_tokens=NEW_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )

        answer = respond(parts)
        assert answer.usage.input_tokens == same.usage.prompt_tokens
        assert answer.output_text == same.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="not an image") as caught:
            respond([{"type": "input_image", "image_url": "data:;base64,AAAA"}])
        assert caught.value.param == "input[0].content[0].image_url"


def video(frames: list[Image.Image], container: str = "mp4") -> bytes:
    """Returns a video of 8 frames a second."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream("mpeg4", rate=8)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_image(frame)))
        output.mux(stream.encode())
    return file.getvalue()


def decoded(data: bytes) -> list[Image.Image]:
    with av.open(io.BytesIO(data)) as file:
        return [frame.to_image() for frame in file.decode(video=0)]


@pytest.mark.parametrize("count", [1, 16, 75])
def test_a_video(worker: Running, reference: LlavaReference, count: int) -> None:
    """Of 75 frames 32 are kept, at equal distances. An image beside the video is alone."""
    data = video([picture(64, 48, seed) for seed in range(count)])
    frames = decoded(data)
    kept = [frames[int(i)] for i in np.arange(0, count, max(1, count / 32)).astype(int)]
    assert (len(frames), len(kept)) == (count, min(count, 32))
    image = picture(90, 50, 5)
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    parts: Any = [
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": data_url(image)}},
        {"type": "text", "text": "What happens?"},
    ]
    prompt = ids(f"<|user|>{IMAGE}{VIDEO}\nWhat happens?<|assistant|>")
    wanted = reference.answer(prompt, [image], NEW_TOKENS, kept)
    answer = chat(worker, parts)
    scores = answer.choices[0].logprobs
    assert scores is not None and scores.content is not None and answer.usage is not None
    assert answer.usage.prompt_tokens == len(wanted.prompt)
    got = [entry.logprob for entry in scores.content]
    assert got == pytest.approx(wanted.logprobs, abs=TOLERANCE)


def test_a_video_of_generate(worker: Running, reference: LlavaReference) -> None:
    """`video_data`, before an image in the text; and a second prompt with a video of its own."""
    data = video([picture(64, 48, seed) for seed in range(6)])
    frames, image = decoded(data), picture(61, 40, 9)
    prompt = ids(f"see {VIDEO} and {IMAGE}")
    wanted = reference.answer(prompt, [image], NEW_TOKENS, frames)
    check("video and image", ask(worker.url, prompt, [image], [data]), wanted)
    other = video([picture(64, 48, seed) for seed in range(20, 23)])
    texts = [f"see {VIDEO}", f"what is {VIDEO}?"]
    body = {
        "input_ids": [ids(text) for text in texts],
        "video_data": [base64.b64encode(each).decode() for each in (data, other)],
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    answers = post_json(worker.url + "/generate", body)
    for text, of_file, answer in zip(texts, (frames, decoded(other)), answers, strict=True):
        wanted = reference.answer(ids(text), [], NEW_TOKENS, of_file)
        assert answer["output_ids"] == wanted.tokens
        assert answer["meta_info"]["prompt_tokens"] == len(wanted.prompt)


def message(*blocks: Any) -> dict[str, Any]:
    """Returns a body of /v1/messages."""
    turn = {"role": "user", "content": list(blocks)}
    return {
        "model": "default",
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "messages": [turn],
    }


def image_block(data: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


def test_the_messages_api(worker: Running, flags: dict[str, Flag]) -> None:
    """An image block is the same as an `image_url` in a chat, and so is one in the result of a tool."""
    image, question = picture(77, 30, 11), {"type": "text", "text": "What is it?"}
    part = {"type": "image_url", "image_url": {"url": data_url(image)}}
    same = chat(worker, [part, question])
    body = message(image_block(encoded(image)), question)
    answer = post_json(worker.url + "/v1/messages", body)
    assert answer["content"][0]["text"] == same.choices[0].message.content
    usage = answer["usage"]
    whole = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert whole == same.usage.prompt_tokens
    assert usage["cache_read_input_tokens"] == cached(whole, flags)
    counted = post_json(worker.url + "/v1/messages/count_tokens", body)
    assert counted["input_tokens"] == whole
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image_block(encoded(image))]}
    of_tool = post_json(worker.url + "/v1/messages/count_tokens", message(result, question))
    text = post_json(
        worker.url + "/v1/messages/count_tokens", message(result | {"content": ""}, question)
    )
    # An empty result has a newline before its text, the image none
    without = whole - len(ids(f"<|user|>{IMAGE}\nWhat is it?<|assistant|>")) + 1
    assert of_tool["input_tokens"] - text["input_tokens"] == without - len(ids("\n"))


SOURCES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a URL": ({"type": "url", "url": "http://127.0.0.1:1/a.png"}, "url", "fetches no URLs"),
    "a URL as data": (
        {"type": "base64", "media_type": "image/png", "data": "http://127.0.0.1:1/a.png"},
        "data",
        "neither a data: URL nor base64",
    ),
    "no image": ({"type": "base64", "media_type": "image/png", "data": "AAAA"}, "data", "not an"),
    "no data": ({"type": "base64", "media_type": "image/png"}, "data", "must be given"),
    "a file": ({"type": "file", "file_id": "a"}, "type", "keeps no files"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_the_messages_api_names_the_field(worker: Running, case: str) -> None:
    source, field, reason = SOURCES[case]
    body = message({"type": "text", "text": "a"}, {"type": "image", "source": source})
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            post_json(worker.url + path, body)
        error = json.loads(caught.value.read())["error"]
        assert caught.value.code == 400
        assert error["param"] == f"messages[0].content[1].source.{field}"
        assert reason in error["message"]


VIDEOS: dict[str, tuple[Any, str, str]] = {
    "no video": (["aGVsbG8="], "video_data[0]", "not a video"),
    "a URL": ("https://127.0.0.1:1/a.mp4", "video_data[0]", "fetches no URLs"),
    "too many": (["aGVsbG8="] * 5, "video_data", "more than 4 videos"),
    "none": ([], "video_data", "1 placeholders of videos for 0 videos"),
}


@pytest.mark.parametrize("case", VIDEOS)
def test_refused_videos_of_generate(worker: Running, case: str) -> None:
    data, field, reason = VIDEOS[case]
    with pytest.raises(urllib.error.HTTPError) as caught:
        post_json(worker.url + "/generate", {"text": f"a {VIDEO}", "video_data": data})
    error = json.loads(caught.value.read())["error"]
    assert caught.value.code == 400
    assert (error["param"], reason in error["message"]) == (field, True), error


REFUSED: dict[str, tuple[Any, str, str]] = {
    "a URL": ("http://127.0.0.1:1/a.png", "image_url", "fetches no URLs"),
    "a file": ("file:///etc/passwd", "image_url", "fetches no URLs"),
    "no image": ("data:image/png;base64,aGVsbG8=", "image_url", "not an image"),
    "no base64": ("data:image/png;base64,?", "image_url", "neither a data: URL nor base64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_field(worker: Running, case: str) -> None:
    url, name, message = REFUSED[case]
    parts: Any = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    with (
        openai.OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as api,
        pytest.raises(openai.BadRequestError, match=message) as caught,
    ):
        api.chat.completions.create(model="default", messages=[{"role": "user", "content": parts}])
    assert caught.value.param == f"messages[0].content[1].{name}"


def test_a_placeholder_in_the_text_is_no_image(worker: Running) -> None:
    messages: Any = [{"role": "user", "content": f"What is {IMAGE}?"}]
    with (
        openai.OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as api,
        pytest.raises(openai.BadRequestError, match="1 placeholders of images for 0 images"),
    ):
        api.chat.completions.create(model="default", messages=messages)
