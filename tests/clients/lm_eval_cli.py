# /// script
# dependencies = ["lm-eval[api]==0.4.13", "transformers>=5"]
# ///
"""lm-eval's local-completions (generation; likelihoods by `echo`) and local-chat-completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checks import Server, command, main

GENERATION = """
task: small_generation
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
LIKELIHOOD = """
task: small_likelihood
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""
QUESTIONS = 12


def _evaluate(server: Server, model: str, path: str, tasks: str, *more: str) -> dict[str, Any]:
    """Returns the samples of each task."""
    folder = server.folder / model / tasks
    (folder / "tasks").mkdir(parents=True)
    data = folder / "questions.jsonl"
    with data.open("w") as file:
        for number in range(QUESTIONS):
            row = {"question": f"{number} and {number}?", "choices": ["one", "two", "many"]}
            file.write(json.dumps({**row, "answer": number % 3}) + "\n")
    for text in (GENERATION, LIKELIHOOD):
        name = text.split()[1]
        (folder / "tasks" / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    where = {
        "model": server.model,
        "base_url": server.v1 + path,
        "num_concurrent": "4",
        "max_retries": "1",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(server.tokenizer),
    }
    command(
        *("lm_eval", "run", "--model", model),
        *("--model_args", ",".join(f"{key}={value}" for key, value in where.items())),
        *("--include_path", folder / "tasks", "--tasks", tasks),
        *("--output_path", folder / "out", "--log_samples"),
        *more,
        cwd=folder,
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
    )
    return {file.name: _rows(file) for file in (folder / "out").rglob("samples_*.jsonl")}


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def generation(server: Server) -> None:
    (rows,) = _evaluate(server, "local-completions", "/completions", "small_generation").values()
    assert len(rows) == QUESTIONS


def likelihood(server: Server) -> None:
    (rows,) = _evaluate(server, "local-completions", "/completions", "small_likelihood").values()
    assert len(rows) == QUESTIONS
    for row in rows:
        logprobs = [float(logprob) for logprob, _greedy in row["filtered_resps"]]
        assert len(logprobs) == 3 and max(logprobs) < 0, row


def generation_by_chat(server: Server) -> None:
    flags = ("small_generation", "--apply_chat_template")
    found = _evaluate(server, "local-chat-completions", "/chat/completions", *flags)
    assert [len(rows) for rows in found.values()] == [QUESTIONS]


main(generation, likelihood, generation_by_chat)
