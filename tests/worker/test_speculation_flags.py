"""Flags of speculative decoding, with SGLang's names."""

from __future__ import annotations

from typing import Any

import pytest

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.tree_shape import TreeShape

TREES = {
    "speculative_algorithm": "EAGLE",
    "speculative_draft_model_path": "x",
    "speculative_eagle_topk": 4,
}


@pytest.mark.parametrize(
    ("settings", "drafts"),
    [
        ({}, 0),
        ({"speculative_algorithm": "NEXTN"}, 3),
        ({"speculative_algorithm": "NEXTN", "speculative_num_draft_tokens": 4}, 3),
        ({"speculative_algorithm": "NEXTN", "speculative_num_steps": 1}, 1),
        ({**TREES, "speculative_num_steps": 2}, 2),
    ],
)
def test_number_of_drafts(settings: dict[str, Any], drafts: int) -> None:
    assert WorkerConfig(**settings).num_drafts == drafts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "--speculative-algorithm EAGLE3: choose one of"),
        ({"speculative_algorithm": "EAGLE"}, "EAGLE: give --speculative-draft-model-path"),
        ({"speculative_num_steps": 2}, "--speculative-num-steps 2: needs .* NEXTN, EAGLE or NGRAM"),
        ({"speculative_draft_model_path": "x"}, "-path x: needs .* NEXTN, EAGLE or NGRAM"),
        ({"speculative_eagle_topk": 4}, "-topk 4: needs .* NEXTN, EAGLE or NGRAM"),
        ({"speculative_num_steps": 2, "speculative_num_draft_tokens": 4}, "num-steps \\+ 1, 3;"),
        ({"speculative_eagle_topk": 17}, "--speculative-eagle-topk 17: "),
        (
            {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 4},
            "--speculative-eagle-topk 4: trees need .* NEXTN or EAGLE; with NGRAM",
        ),
        ({**TREES, "speculative_num_draft_tokens": 38}, "-tokens 38: from 2 to 37 with"),
        ({**TREES, "speculative_num_draft_tokens": 1}, "-tokens 1: from 2 to 37 with"),
        ({**TREES, "speculative_num_steps": 7, "speculative_eagle_topk": 16}, "at most 64"),
        ({**TREES, "attention_backend": "flashinfer"}, "not with --attention-backend flash"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "x"},
            "NGRAM has no draft layer",
        ),
        ({"enable_flashinfer_mla": True}, "not with --enable-flashinfer-mla"),
        ({"enable_torch_compile": True}, "not with --enable-torch-compile"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    algorithm = {} if message.endswith("EAGLE or NGRAM") else {"speculative_algorithm": "NEXTN"}
    with pytest.raises(ConfigError, match=message):
        WorkerConfig(**{**algorithm, **settings})


def test_trees() -> None:
    assert WorkerConfig(**TREES).tree == TreeShape(4, 3, 8, 128)
    few = WorkerConfig(**TREES, speculative_num_steps=1, max_running_requests=9)
    assert (few.tree, few.rows_per_decode) == (TreeShape(4, 1, 5, 9), 5)
    wide = WorkerConfig(**TREES, speculative_num_steps=5, speculative_num_draft_tokens=32)
    assert (wide.num_drafts, wide.rows_per_decode) == (5, 32)
