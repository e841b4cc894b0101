"""Trains a tokenizer of any size on the installed Python sources, which are enough text for so many merges."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<eos>"


def train_tokenizer(vocab_size: int, special_tokens: tuple[str, ...] = ()) -> Tokenizer:
    """Returns a byte-level BPE tokenizer, as DeepSeek's and Llama's. `EOS` is the first token, then
    `special_tokens`."""
    installed = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator((path.read_text(errors="replace") for path in installed), trainer)
    found = tokenizer.get_vocab_size()
    assert found == vocab_size, f"{len(installed)} files are enough for {found} tokens alone"
    return tokenizer


def write_tokenizer(folder: Path, vocab_size: int, special_tokens: tuple[str, ...] = ()) -> None:
    train_tokenizer(vocab_size, special_tokens).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": EOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
