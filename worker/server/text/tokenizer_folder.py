"""The contents of a tokenizer folder: the Rust tokenizer, its special tokens and chat templates.

transformers reads it, because it knows the many forms of such folders. Its import takes a second of CPU time in each API
process. So folders in the plain form, whose tokenizer.json is complete, are read here, with the same result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

# Names of transformers' class for any tokenizer.json: until version 4, and since version 5
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Models that transformers reads with this class, whatever class the folder names
GENERIC_MODELS = ("deepseek_v2", "deepseek_v3")

SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"]
)
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
# Other fields of tokenizer_config.json that change neither the tokens nor the templates
WITHOUT_EFFECT = frozenset(
    [
        "tokenizer_class",
        "model_max_length",
        "clean_up_tokenization_spaces",
        "padding_side",
        "truncation_side",
        "model_input_names",
        "backend",
        "legacy",
        "sp_model_kwargs",
        "add_bos_token",
        "add_eos_token",
    ]
)
READ = {*SPECIAL_TOKENS, *EXTRA_TOKENS, "added_tokens_decoder", "chat_template"}
# Files that change the tokens of tokenizer.json
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json")


class TokenizerFolder(NamedTuple):
    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # by name: `bos_token`, ...
    eos_id: int | None
    templates: dict[str, str]  # by name; that of most folders is `default`
    kind: str  # transformers' name of the class


def read_folder(folder: Path) -> TokenizerFolder:
    """Raises whatever transformers raises for a folder without a usable tokenizer."""
    plain = None
    with suppress(Exception):  # transformers names the reason
        plain = _read_plain(folder)
    return plain or _read_with_transformers(folder)


def _read_with_transformers(folder: Path) -> TokenizerFolder:
    import transformers

    config = _read_json(folder / "tokenizer_config.json")
    # AutoTokenizer, with the same result, imports the list of all models: 0.4 s
    is_generic = config.get("tokenizer_class") in GENERIC and "auto_map" not in config
    kind = transformers.PreTrainedTokenizerFast if is_generic else transformers.AutoTokenizer
    loaded = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise TypeError("no tokenizer.json that the tokenizers library reads")
    return TokenizerFolder(
        backend,
        dict(loaded.special_tokens_map),
        loaded.eos_token_id,
        _by_name(loaded.chat_template),
        type(loaded).__name__,
    )


def _read_plain(folder: Path) -> TokenizerFolder | None:
    """Returns the contents of a folder in the plain form; None for other folders. Raises any exception for broken ones."""
    config = _read_json(folder / "tokenizer_config.json")
    if not _is_plain(folder, config):
        return None
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = {
        name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name) is not None
    }
    if not _has_all(backend, config, special):
        return None
    eos = special.get("eos_token")
    return TokenizerFolder(
        backend,
        special,
        None if eos is None else backend.token_to_id(eos),
        _templates(folder) or _by_name(config.get("chat_template")),
        kind=GENERIC[-1],
    )


def _is_plain(folder: Path, config: Mapping[str, Any]) -> bool:
    if config.get("tokenizer_class") not in GENERIC:
        model = _read_json(folder / "config.json").get("model_type")
        if model not in GENERIC_MODELS:
            return False
    extra = [config.get(name) or [] for name in EXTRA_TOKENS]
    return (
        all(name in READ or name in WITHOUT_EFFECT for name in config)
        and all(isinstance(tokens, list) for tokens in extra)
        and all(isinstance(token, str) for tokens in extra for token in tokens)
        and not any((folder / name).exists() for name in OTHER_FILES)
    )


def _has_all(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> bool:
    """Returns whether tokenizer.json has all tokens of tokenizer_config.json, with the same properties. transformers adds
    those that are missing."""
    added = backend.get_added_tokens_decoder()
    by_content = {token.content: token for token in added.values()}
    extra = [text for name in EXTRA_TOKENS for text in config.get(name) or ()]
    listed = config.get("added_tokens_decoder", {})
    return (
        all(text in by_content and by_content[text].special for text in special.values())
        and all(text in by_content for text in extra)
        and all(_same(added.get(int(number)), token) for number, token in listed.items())
    )


def _same(token: tokenizers.AddedToken | None, fields: Mapping[str, Any]) -> bool:
    same: bool = (
        token is not None and token.__getstate__() == tokenizers.AddedToken(**fields).__getstate__()
    )
    return same


def _templates(folder: Path) -> dict[str, str]:
    """Returns the templates in files of their own."""
    files = {"default": folder / "chat_template.jinja"}
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files |= {file.name.removesuffix(".jinja"): file for file in more}
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.exists()}


def _by_name(template: Any) -> dict[str, str]:
    """Returns the templates of tokenizer_config.json or of transformers by name."""
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, str):
        return {"default": template}
    return template or {}


def _content(token: str | Mapping[str, Any]) -> str:
    """Raises KeyError, ValueError for a token in another form than those that transformers writes."""
    if isinstance(token, str):
        return token
    if token["__type"] != "AddedToken":
        raise ValueError(token)
    return str(token["content"])


def _read_json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return values
