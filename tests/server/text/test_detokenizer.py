"""Incremental detokenization, compared with decoding all tokens at once."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.server.text.detokenizer import MAX_HELD_TOKENS, Detokenizer
from mla_router.worker.server.text.stop_strings import StopMatcher

BACKEND = tokenizers.Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
VOCABULARY = BACKEND.get_vocab()
HIDDEN = frozenset({0, 1})
CHARACTERS = st.text(max_size=30)


def pieces(ids: list[int], cuts: list[int], tokenizer: Tokenizer = BACKEND) -> list[str]:
    """Returns the text of `ids` that arrive in runs ending at `cuts`."""
    detokenizer = Detokenizer(tokenizer, HIDDEN)
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    shown = [detokenizer.push(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return [*shown, detokenizer.flush()]


def whole(ids: list[int], tokenizer: Tokenizer = BACKEND) -> str:
    visible = [token for token in ids if token not in HIDDEN]
    text: str = tokenizer.decode(visible, skip_special_tokens=False)
    return text


@given(CHARACTERS, st.lists(st.integers(0, 60)))
def test_pieces_of_text_add_up(text: str, cuts: list[int]) -> None:
    ids = BACKEND.encode(text, add_special_tokens=False).ids
    shown = pieces(ids, cuts)
    assert "".join(shown) == whole(ids)
    assert "\ufffd" in text or "\ufffd" not in "".join(shown), "showed a part of a character"


@given(st.lists(st.integers(0, 4095), max_size=30), st.lists(st.integers(0, 30)))
def test_pieces_of_random_tokens_add_up(ids: list[int], cuts: list[int]) -> None:
    """Random weights generate invalid UTF-8. The text must equal that of decoding all tokens at once."""
    assert "".join(pieces(ids, cuts)) == whole(ids)


@given(
    CHARACTERS,
    st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 60)),
    st.data(),
)
def test_with_stop_strings(
    text: str, stops: list[str], cuts: list[int], data: st.DataObject
) -> None:
    """Detokenizer and matcher together cut the text at the first stop string."""
    if text and data.draw(st.booleans()):  # a stop string that occurs
        at = data.draw(st.integers(0, len(text) - 1))
        stops = [*stops, text[at : at + 3]]
    ids = BACKEND.encode(text, add_special_tokens=False).ids
    matcher = StopMatcher(tuple(stops))
    shown = "".join(matcher.push(piece) for piece in pieces(ids, cuts))
    if matcher.matched is None:
        shown += matcher.flush()

    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert shown == text
    else:
        longest = max((s for s in stops if text[: min(ends)].endswith(s)), key=len)
        assert (shown, matcher.matched) == (text[: min(ends) - len(longest)], longest)


def test_special_tokens_are_not_shown() -> None:
    hello = BACKEND.encode("hello", add_special_tokens=False).ids
    assert "".join(pieces([0, *hello, 1, *hello, 1], [1, 2, 3])) == "hellohello"


def test_a_character_of_four_tokens_is_not_split() -> None:
    ids = [VOCABULARY[piece] for piece in "ðŁĺĢ"]  # the bytes of an emoji
    assert pieces(ids, [1, 2, 3]) == ["", "", "", "😀", ""]


def test_broken_bytes_cost_constant_time_and_end() -> None:
    """Tokens that never complete a character: the library alone would decode all of them at each step."""
    broken = VOCABULARY["Ģ"]  # a continuation byte
    hello = BACKEND.encode("hello", add_special_tokens=False).ids
    detokenizer = Detokenizer(BACKEND, HIDDEN)
    shown = [detokenizer.push([broken]) for _ in range(10 * MAX_HELD_TOKENS)]
    assert sum(map(bool, shown)) >= 9, "held everything back"
    text = "".join(shown) + detokenizer.push(hello) + detokenizer.flush()
    assert text == "\ufffd" * (10 * MAX_HELD_TOKENS) + "hello"


def test_a_character_after_many_broken_bytes_comes_whole() -> None:
    """At every place in the run: those that end a run are looked at again, with what follows."""
    broken, emoji = VOCABULARY["Ģ"], [VOCABULARY[piece] for piece in "ðŁĺĢ"]
    for before in range(2 * MAX_HELD_TOKENS + 4):
        ids = [broken] * before + emoji
        assert "".join(pieces(ids, list(range(len(ids))))) == "\ufffd" * before + "😀", before


def test_decoders_that_look_back() -> None:
    """SentencePiece: the leading space of the first token is dropped, those of the others are not."""
    tokenizer = with_byte_fallback("F0", "9F", "98", "80")
    ids = [2, 3, 4, 5, 6, 7, 8, 3, 5, 6]
    assert whole(ids, tokenizer) == "the cats😀 cat\ufffd\ufffd"
    assert "".join(pieces(ids, list(range(12)), tokenizer)) == whole(ids, tokenizer)


def with_byte_fallback(*single_bytes: str) -> Tokenizer:
    vocabulary = {"<unk>": 0, "<s>": 1, "▁the": 2, "▁cat": 3, "s": 4}
    vocabulary |= {f"<0x{byte}>": 5 + i for i, byte in enumerate(single_bytes)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Prepend("▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@given(st.lists(st.integers(2, 10), max_size=40))
def test_broken_bytes_do_not_end_the_answer(ids: list[int]) -> None:
    """Decoded at once, the whole run is invalid; token by token, the earlier text remains."""
    tokenizer = with_byte_fallback("0A", "F0", "9F", "98", "80", "2E")

    def words(text: str) -> str:
        # The single bytes make letters, too, such as the Tangut F0 98 9F 9F
        return "".join(char for char in text if char in "thecas ")

    shown = "".join(pieces(ids, list(range(len(ids) + 1)), tokenizer))
    expected = whole(ids, tokenizer)
    assert words(shown).lstrip(" ") == words(expected).lstrip(" ")
    if "\ufffd" not in expected:
        assert shown == expected


def test_two_requests_do_not_share_state() -> None:
    left, right = Detokenizer(BACKEND, HIDDEN), Detokenizer(BACKEND, HIDDEN)
    for token in [VOCABULARY[piece] for piece in "ðŁĺĢ"]:
        shown = left.push([token])
        assert right.push(BACKEND.encode("a", add_special_tokens=False).ids) == "a"
    assert shown == "😀"
