"""Logprobs against float64."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.engine.sampling.logprobs import SLICE_ROWS, Run, prompt_token_logprobs
from mla_router.worker.generation import SamplingParams
from support.sampler_driver import SamplerDriver
from support.token_masks import token_masks

V = 300


def test_each_row_gets_its_number_of_top_logprobs() -> None:
    """Logprobs are of the model's distribution, without penalties and temperature."""
    driver = SamplerDriver(8, V)
    asked = [None, 0, 1, 5, None, 20, 0, 3]
    for slot, top in enumerate(asked):
        sampling = SamplingParams(
            9,
            temperature=0.7 * (slot % 2),
            logit_bias=((3, 100.0),) if slot % 3 else (),
            repetition_penalty=1.5,
            logprobs=top is not None,
            top_logprobs=top or 0,
        )
        driver.admit(slot, sampling, [slot, slot + 1])
    draw = torch.Generator().manual_seed(0)
    logits = {slot: 10 * torch.randn(V, generator=draw) for slot in range(8)}
    result = driver.step(logits)
    assert result.logprobs is not None
    for slot, top in enumerate(asked):
        logprobs = result.logprobs[slot]
        if top is None:
            assert logprobs is None
            continue
        want = logits[slot].double().log_softmax(-1)
        assert logprobs is not None
        assert logprobs.logprobs == pytest.approx([want[result.tokens[slot][0]].item()], abs=1e-5)
        if top == 0:
            assert logprobs.top_ids == logprobs.top_logprobs == []
        else:
            best = want.topk(top)
            assert logprobs.top_ids == [best.indices.tolist()]
            assert logprobs.top_logprobs[0] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_masked_tokens_have_no_logprob() -> None:
    """A logit bias does not change this."""
    driver = SamplerDriver(2, V)
    sampling = SamplingParams(9, logit_bias=((3, 100.0),), logprobs=True, top_logprobs=5)
    for slot in range(2):
        driver.admit(slot, sampling, [1])
    logits = {
        slot: torch.randn(V, generator=torch.Generator().manual_seed(slot)) for slot in (0, 1)
    }
    allowed = [4, 33, 200]
    result = driver.step(logits, token_masks({1: allowed}, V))
    assert result.logprobs is not None
    free, masked = result.logprobs
    assert free is not None
    assert masked is not None
    assert len(free.top_ids[0]) == 5
    want = dict(zip(allowed, logits[1][allowed].double().log_softmax(-1).tolist(), strict=True))
    best = sorted(allowed, key=want.__getitem__, reverse=True)
    assert masked.top_ids == [best]
    assert masked.top_logprobs[0] == pytest.approx([want[token] for token in best], abs=1e-5)
    assert result.tokens[1] == [best[0]]
    assert masked.logprobs == pytest.approx([want[best[0]]], abs=1e-5)


def test_no_logprobs_without_a_request_for_them() -> None:
    driver = SamplerDriver(2, V)
    driver.admit(0, SamplingParams(9), [1])
    assert driver.step({0: torch.zeros(V)}).logprobs is None


def test_prompt_logprobs_are_computed_in_slices() -> None:
    draw, rows = torch.Generator().manual_seed(0), 2 * SLICE_ROWS + 3
    head, hidden = torch.randn(16, V, generator=draw), torch.randn(rows, 16, generator=draw)
    tokens = torch.randint(V, (rows,), generator=draw)
    largest = 0

    def logits_of(some: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(some))
        return some @ head

    runs = [Run(2, SLICE_ROWS + 1, 4), Run(0, SLICE_ROWS + 2, 0)]
    logprobs = prompt_token_logprobs(hidden, logits_of, tokens, runs).by_owner(4)
    assert largest == SLICE_ROWS
    want = (hidden.double() @ head.double()).log_softmax(-1)
    chosen = want.gather(1, tokens[:, None]).flatten()
    first, second = logprobs[2], logprobs[0]
    assert logprobs[1] is None and logprobs[3] is None
    assert first is not None and second is not None
    got = torch.tensor(first.logprobs + second.logprobs, dtype=torch.float64)
    torch.testing.assert_close(got, chosen, atol=1e-4, rtol=0)
    assert first.top_ids == want[: SLICE_ROWS + 1].topk(4).indices.tolist()
    assert second.top_ids == []
