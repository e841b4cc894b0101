"""The tokenizer of a model folder. Encoding calls the Rust tokenizer directly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path

from mla_router.worker.server.daemon_thread import start_daemon_thread
from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.text.chat_template import ChatTemplate
from mla_router.worker.server.text.detokenizer import Detokenizer
from mla_router.worker.server.text.tokenizer_folder import TokenizerFolder, read_folder
from mla_router.worker.tokenizer_files import (
    MalformedError,
    byte_level_alphabet,
    read_chat_template,
    read_eos_ids,
)

log = logging.getLogger(__name__)

# Encoding takes about 0.2 microseconds a character. Longer texts are encoded in a thread, to keep the event loop free.
MAX_INLINE_CHARS = 1024

# For the short conversations that a chat template renders at the start, in a millisecond each
TEMPLATE_S = 10.0

NAMED_TOKENS = 1 << 14  # size of the caches of texts and bytes: some megabytes


class TokenizerError(Exception):
    """The folder has no usable tokenizer. The message gives the reason."""


class Tokenizer:
    def __init__(
        self, folder: Path, model_folder: Path | None = None, chat_template: Path | None = None
    ) -> None:
        """Loads the tokenizer in `folder`. Raises TokenizerError.

        `model_folder`, by default the same, names the EOS tokens. The file `chat_template` replaces the tokenizer's
        template.
        """
        loaded = _read(folder)
        backend = loaded.backend
        self.template = _template_of(folder, loaded, chat_template)
        self.kind = loaded.kind
        self.special_tokens = loaded.special_tokens
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError(f"{folder}: no token in tokenizer.json")
        # The longest entry limits the text of a token.
        self._longest_token = max(map(len, vocabulary))
        try:
            self.eos_ids = read_eos_ids(model_folder or folder, loaded.eos_id)
        except MalformedError as error:
            raise TokenizerError(str(error)) from error
        added = backend.get_added_tokens_decoder()
        self._byte_of = byte_level_alphabet()
        self._before = [vocabulary["a"]] if "a" in vocabulary else []
        # Log-probabilities name the same few thousand tokens again and again, twenty and more at each position.
        self.text_of = lru_cache(NAMED_TOKENS)(self._text_of)
        self.bytes_of = lru_cache(NAMED_TOKENS)(self._bytes_of)
        self.hidden_ids = self.eos_ids | {token for token, entry in added.items() if entry.special}

    async def encode(
        self,
        text: str,
        *,
        context_length: int,
        add_special_tokens: bool = True,
        field: str | None = None,
    ) -> list[int]:
        """Returns the token ids of a raw prompt, with the BOS token if the model has one. Raises InvalidRequest for
        `field`."""
        return await self._encode(text, add_special_tokens, context_length, field)

    async def encode_rendered(self, text: str, *, context_length: int) -> list[int]:
        """Returns the token ids of a rendered conversation, which contains its BOS token. Raises InvalidRequest."""
        return await self._encode(text, False, context_length, None)

    def detokenizer(
        self, *, skip_special_tokens: bool = True, shown: Collection[str] = ()
    ) -> Detokenizer:
        """Returns a detokenizer that omits special tokens, except those in `shown`."""
        hidden = self.hidden_ids if skip_special_tokens else frozenset()
        shown_ids = {self._backend.token_to_id(token) for token in shown}
        return Detokenizer(self._backend, hidden - shown_ids if shown_ids else hidden)

    def special_ids(self, tokens: Iterable[str]) -> dict[str, int]:
        """Returns the ids of the special tokens among `tokens`."""
        ids = ((token, self._backend.token_to_id(token)) for token in tokens)
        return {token: number for token, number in ids if number in self.hidden_ids}

    def decode(self, token_ids: list[int]) -> str:
        """Returns the text of all tokens, including special ones."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def decode_shown(self, token_ids: list[int]) -> str:
        """Returns the text without special tokens, as in an answer."""
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def pieces_of(self, token_ids: list[int]) -> list[str]:
        """Returns each token in the spelling of the vocabulary; empty for unknown ids."""
        return [self._backend.id_to_token(token) or "" for token in token_ids]

    def _text_of(self, token_id: int) -> str:
        """Returns the text of one token; U+FFFD stands for a part of a character."""
        # After another token, because some decoders drop the space of the first one.
        return self.decode([*self._before, token_id]).removeprefix(self.decode(self._before))

    def _bytes_of(self, token_id: int) -> tuple[int, ...] | None:
        """Returns the bytes of one token, even a part of a character; None if they are unknown."""
        text = self.text_of(token_id)
        if "\ufffd" not in text:
            return tuple(text.encode())
        piece = self._backend.id_to_token(token_id) or ""
        if piece.startswith("<0x"):
            return (int(piece[3:5], 16),)
        if all(char in self._byte_of for char in piece):
            return tuple(self._byte_of[char] for char in piece)
        return None

    async def _encode(
        self, text: str, special: bool, context_length: int, field: str | None
    ) -> list[int]:
        if len(text) > context_length * self._longest_token:
            raise InvalidRequest(
                f"The input ({len(text)} characters) is longer than the model's context length "
                f"({context_length} tokens)",
                param=field,
                code="context_length_exceeded",
            )
        if len(text) <= MAX_INLINE_CHARS:
            return self._encode_now(text, special)
        return await asyncio.to_thread(self._encode_now, text, special)

    def _encode_now(self, text: str, special: bool) -> list[int]:
        # As a batch of one: `encode` holds the GIL, even in a thread. Without offsets it is twice as fast.
        batch = self._backend.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = batch[0].ids
        return ids


def _read(folder: Path) -> TokenizerFolder:
    """Raises TokenizerError."""
    try:
        loaded = read_folder(folder)
    except Exception as error:  # transformers raises whatever the file's reader raised
        if (folder / "tokenizer.json").exists():
            reason = "no usable tokenizer"
        else:
            reason = "no tokenizer.json in this folder; give one that has it as --tokenizer-path"
        raise TokenizerError(f"{folder}: {reason} ({' '.join(str(error).split())})") from error
    try:  # only its first use shows a malformed post-processor, and as a panic, which is no Exception
        loaded.backend.encode_batch_fast(["a"], add_special_tokens=True)
    except BaseException as error:
        raise TokenizerError(
            f"{folder / 'tokenizer.json'}: it encodes no text ({error}); look at its post_processor"
        ) from error
    return loaded


def _template_of(folder: Path, loaded: TokenizerFolder, given: Path | None) -> ChatTemplate:
    """Returns the template of the tokenizer in `folder`, or the `given` file of --chat-template. Raises TokenizerError."""
    try:
        templates = loaded.templates if given is None else {"default": read_chat_template(given)}
    except MalformedError as error:
        raise TokenizerError(str(error)) from error
    rendering = start_daemon_thread(ChatTemplate, templates, loaded.special_tokens)
    try:
        template = rendering.result(TEMPLATE_S)
    except TimeoutError:
        name = f"chat template of {folder}" if given is None else f"--chat-template {given}"
        raise TokenizerError(
            f"{name}: still renders a conversation of one word after {TEMPLATE_S:g} s; give another file as --chat-template"
        ) from None
    if (wrong := template.syntax_error()) is not None:
        reason = f"line {wrong.lineno}: {wrong.message}"
        if given is not None:
            raise TokenizerError(f"--chat-template {given}: {reason}")
        log.warning(
            "chats are refused: the chat template of %s: %s; give another one as --chat-template",
            folder,
            reason,
        )
    return template
