"""Finds the model's folder: a local one, or a snapshot of a repository on the Hugging Face Hub.

The package huggingface_hub downloads and caches, with its variables HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from mla_router.worker.config import ConfigError, WorkerConfig

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TEXTS = ("*.json", "*.jinja", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)
_COPIES = ("original/*", "onnx/*")  # the same weights in other formats


def locate(config: WorkerConfig) -> WorkerConfig:
    """Returns `config` with local folders in place of names on the hub. Downloads files that are not in the cache, with
    a progress bar on stderr. Raises ConfigError."""
    found: dict[str, Any] = {}
    if config.model_path:
        patterns = _TEXTS if config.load_format == "dummy" else _TEXTS + _WEIGHTS
        folder = _find("--model-path", config.model_path, config, patterns, config.revision)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model-path {config.model_path}: no config.json in this folder")
        if str(folder) != config.model_path:
            found = {"model_path": str(folder), "revision": ""}
            found["served_model_name"] = config.served_model_name or config.model_path
    if config.tokenizer_path:
        folder = _find("--tokenizer-path", config.tokenizer_path, config, _TEXTS, "")
        found["tokenizer_path"] = str(folder)
    if config.speculative_draft_model_path:
        flag, path = "--speculative-draft-model-path", config.speculative_draft_model_path
        folder = _find(flag, path, config, _TEXTS + _WEIGHTS, "")
        found["speculative_draft_model_path"] = str(folder)
    return dataclasses.replace(config, **found)


def _find(
    flag: str, path: str, config: WorkerConfig, patterns: tuple[str, ...], revision: str
) -> Path:
    if Path(path).is_dir():
        if revision:
            raise ConfigError(f"--revision {revision}: {path} is a folder; leave --revision out")
        return Path(path)
    if Path(path).exists():
        raise ConfigError(f"{flag} {path}: a file; give the folder of the model")
    if not _HUB_NAME.fullmatch(path):
        raise ConfigError(
            f"{flag} {path}: no such folder; a model on the Hugging Face Hub is ORGANISATION/NAME"
        )
    return _download(flag, path, revision or None, config.download_dir or None, patterns)


def _download(
    flag: str, name: str, revision: str | None, cache: str | None, patterns: tuple[str, ...]
) -> Path:
    # A slow import that local folders do not need
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=cache,
                allow_patterns=list(patterns),
                ignore_patterns=list(_COPIES),
            )
        )
    except errors.GatedRepoError:
        reason = "access is restricted: accept its terms on the hub, and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = f"the hub has no --revision {revision} of it"
    except errors.RepositoryNotFoundError:
        reason = "neither a folder here nor a public model on the hub; private ones need HF_TOKEN"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = (
            "no such folder, not in the cache, and the Hugging Face Hub cannot be reached: download "
            "it elsewhere and give its folder, or look at HF_ENDPOINT, HF_HUB_OFFLINE and the proxy"
        )
    except (errors.HfHubHTTPError, OSError) as error:
        reason = f"the download failed: {error}"
    raise ConfigError(f"{flag} {name}: {reason}")
