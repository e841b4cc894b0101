"""The parts of the load generator: arrivals, prompts, data sets, figures."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from array import array
from pathlib import Path
from typing import Any

import pytest
import transformers

from loadgen import arguments, metrics, sharegpt, traffic, workload
from loadgen.apis import BACKENDS, Answer, BadAnswer, RequestOptions
from loadgen.client import Outcome
from loadgen.tokens import Prompt, TokenizerError, Vocabulary
from support.processes import ROOT

SMALL_MODEL = ROOT / "worker/model/small"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(SMALL_MODEL)


@pytest.mark.parametrize("tokens", [1, 7, 300, 2000])
def test_drawn_text_has_the_tokens_that_were_asked_for(vocabulary: Vocabulary, tokens: int) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(SMALL_MODEL)
    for seed in range(5):
        prompt = vocabulary.draw(random.Random(seed), tokens)
        assert tokenizer(prompt.text, add_special_tokens=False)["input_ids"] == prompt.ids
        assert len(prompt.ids) == tokens
        assert not set(prompt.ids) & set(tokenizer.all_special_ids)


def test_a_folder_without_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="--tokenizer"):
        Vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="--tokenizer"):
        Vocabulary(tmp_path)


def test_arrivals_are_a_poisson_process() -> None:
    due = list(traffic.arrivals(random.Random(3), 20_001, rate=50.0))
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    assert due[0] == 0
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.03)  # of an exponential: the mean
    assert list(traffic.arrivals(random.Random(3), 4, rate=float("inf"))) == [0.0] * 4


def test_groups_share_their_system_prompt_alone(vocabulary: Vocabulary) -> None:
    made = workload.shared_prefix(
        vocabulary,
        random.Random(0),
        groups=3,
        prompts_per_group=4,
        system_tokens=50,
        question_tokens=10,
        output_tokens=6,
    )
    assert len(made) == 12
    systems: dict[str, set[str]] = {}
    for (turn,) in made:
        system, _, question = turn.prompt.text.partition("\n\n")
        systems.setdefault(system, set()).add(question)
        assert turn.output_tokens == 6
    assert [len(questions) for questions in systems.values()] == [4, 4, 4]


def sharegpt_file(folder: Path, pairs: list[tuple[str, str]]) -> Path:
    path = folder / "sharegpt.json"
    entries = [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
        for q, a in pairs
    ]
    path.write_text(json.dumps([*entries, {"conversations": [{"value": "alone"}]}]))
    return path


def test_sharegpt_drops_short_and_long_conversations(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    good, answer = "what does a router do with prefixes", "it remembers where they are cached"
    pairs = [(good, answer), ("a", answer), (good, "b"), ("word " * 3000, answer)]
    read = sharegpt.read(sharegpt_file(tmp_path, pairs))
    ((turn,),) = sharegpt.conversations(vocabulary, random.Random(0), read, 10, None)
    assert turn.prompt.text == good
    assert turn.output_tokens == vocabulary.count([answer])


@pytest.mark.parametrize("content", ["[", "[1]", "{}", '[{"conversations": []}]', "[]"])
def test_a_file_of_another_form_is_said(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(workload.WorkloadError, match="--dataset-path"):
        sharegpt.read(path)


def test_a_conversation_goes_back_with_its_answers() -> None:
    options = RequestOptions("m", stream=False, ignore_eos=True, token_ids=False, extra={"x": 1})
    prompt, history = Prompt("third", [3]), [("first", "second ")]
    chat = BACKENDS["sglang-oai-chat"].body(options, history, prompt, 5)
    assert [(m["role"], m["content"]) for m in chat["messages"]] == [
        ("user", "first"),
        ("assistant", "second "),
        ("user", "third"),
    ]
    assert (chat["max_tokens"], chat["x"]) == (5, 1)
    assert BACKENDS["vllm"].body(options, history, prompt, 5)["prompt"] == "firstsecond third"
    native = BACKENDS["sglang"].body(options, history, prompt, 5)
    assert native["text"] == "firstsecond third"
    assert native["sampling_params"]["max_new_tokens"] == 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_event_is_not_an_answer(backend: str) -> None:
    with pytest.raises(BadAnswer, match="died"):
        BACKENDS[backend].read(b'{"error": {"message": "died"}}', Answer())


def outcome(latency: float, ttft: float, gaps: list[float], error: str = "") -> Outcome:
    answer = Answer(["x"], 1, "length", prompt_tokens=10, output_tokens=len(gaps) + 1)
    return Outcome(0, 10, len(gaps) + 1, latency, ttft, array("d", gaps), answer, error)


def test_figures_count_successful_requests() -> None:
    good = [outcome(1.0, 0.4, [0.2, 0.4]), outcome(2.0, 0.5, [1.5]), outcome(0.5, 0.5, [])]
    bad = outcome(9.0, 9.0, [9.0], error="HTTP 500: no")
    result = metrics.summarise([*good, bad], 4.0, len)
    assert (result["completed"], result["failed"]) == (3, 1)
    assert result["errors"] == {"HTTP 500: no": 1}
    assert result["total_output_tokens"] == 6
    assert result["output_throughput"] == pytest.approx(6 / 4)
    assert result["concurrency"] == pytest.approx(3.5 / 4)
    assert result["mean_e2e_latency_ms"] == pytest.approx(3500 / 3)
    assert result["median_ttft_ms"] == pytest.approx(500)
    assert result["mean_tpot_ms"] == pytest.approx((300 + 1500) / 2)  # one token has none
    assert result["median_itl_ms"] == pytest.approx(400)
    assert result["max_itl_ms"] == pytest.approx(1500)
    values = [1.0, 2.0, 0.5]
    inclusive = statistics.quantiles(values, n=100, method="inclusive")
    assert result["p90_e2e_latency_ms"] == pytest.approx(inclusive[89] * 1e3)
    assert result["cached_tokens"] is None


def test_nothing_but_failures_has_no_figures() -> None:
    result = metrics.summarise([outcome(1.0, 1.0, [], error="x")], 1.0, len)
    assert (result["completed"], result["failed"]) == (0, 1)
    assert result["mean_e2e_latency_ms"] is None


@pytest.mark.parametrize(
    "words",
    [
        ["--num-prompts=0"],
        ["--request-rate=0"],
        ["--random-range-ratio=1.5"],
        ["--extra-request-body=[1]"],
        ["--backend=sglang-oai-chat", "--tokenize-prompt"],
    ],
)
def test_senseless_options_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments.parse("", words)
    assert words[-1].partition("=")[0] in capsys.readouterr().err
