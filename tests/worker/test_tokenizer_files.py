"""Facts about tokens in the files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mla_router.worker.tokenizer_files import MalformedError, read_eos_ids


def test_all_files_may_name_ends_but_none_that_the_model_has_not(tmp_path: Path) -> None:
    assert read_eos_ids(tmp_path, 3) == {3}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 100, -1]}))
    assert read_eos_ids(tmp_path, 3) == {3, 7, 9}
    assert read_eos_ids(tmp_path, None) == {7, 9}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("version https://git-lfs", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ('{"eos_token_id": "</s>"}', "eos_token_id '</s>' is not a token id"),
        ('{"eos_token_id": [1, null]}', "eos_token_id .* is not a token id"),
        ('{"vocab_size": "64"}', "vocab_size '64' is not an integer"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(MalformedError, match=rf"generation_config\.json: {reason}"):
        read_eos_ids(tmp_path, None)
