"""Traces the answers that drafts change in bfloat16 to the sums that are rounded otherwise.

    python bench/accuracy/speculation_rounding.py --num-questions 400 --dtype bfloat16        # on a GPU

The same word problems, half of them greedy and half sampled with seeds, are continued for 64 tokens without drafts, with drafts, and
without drafts in other batch sizes. All logits are kept. Up to the first token that differs, two runs have the same tokens:
there the two best scores (logits over temperature, plus the noise of the position) are compared with the difference of the
two runs' logits, and with their distance from the logits of a float32 engine that is given the same tokens. Then one step
behind the same KV cache is run once with one row and once with the rows of the drafts, kernel by kernel, and the first
intermediate result that differs is named.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from run import questions
from tokenizers import Tokenizer
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
from record import record

from mla_router.worker.config import SMALL_MODEL, WorkerConfig
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.generation import SamplingParams
from mla_router.worker.kernels.sampling.noise import gumbel
from mla_router.worker.messages import Generate, ToScheduler
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from support.scripted_scheduler import run

Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    sampling: SamplingParams


@dataclass
class Answers:
    """The tokens of each request, and the logits of each of them."""

    tokens: list[list[int]]
    logits: list[list[Tensor]]


@dataclass
class Recorder:
    """Keeps the logits of all sampled rows of an engine, by the number of admissions before, and by position."""

    engine: Engine
    rows: dict[tuple[int, ...], dict[int, Tensor]] = field(default_factory=dict)
    _prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _kept: list[tuple[list[tuple[int, ...]], Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sample = self.engine.sampler.sample
        self.engine.sampler.sample = self.sample  # type: ignore[method-assign]

    def sample(self, logits: Tensor, slots: Tensor, plan: StepPlan, *args: Any, **how: Any) -> Any:
        for admitted in plan.admitted:
            self._prompts[admitted.slot] = tuple(admitted.prompt)
        each = plan.rows_per_decode
        counts = [each] * len(plan.decode_slots)
        counts += [1] * (len(plan.sampled_slots) - len(counts))
        owners = [
            self._prompts[slot]
            for slot, count in zip(plan.sampled_slots, counts, strict=True)
            for _ in range(count)
        ]
        offsets = torch.tensor([i for count in counts for i in range(count)], device=logits.device)
        repeated = slots.repeat_interleave(torch.tensor(counts, device=logits.device))
        positions = how["tokens"].lengths[repeated] + offsets
        self._kept.append((owners, positions, logits.clone()))
        return self._sample(logits, slots, plan, *args, **how)

    def close(self) -> dict[tuple[int, ...], dict[int, Tensor]]:
        """Returns the logits by prompt and position. A later step's take the place of an earlier one's, whose drafts were
        wrong."""
        del self.engine.sampler.sample
        for owners, positions, logits in self._kept:
            host = logits.float().cpu()
            for owner, position, row in zip(owners, positions.tolist(), host, strict=True):
                self.rows.setdefault(owner, {})[position] = row
        return self.rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-path", type=Path, default=SMALL_MODEL)
    parser.add_argument("--num-questions", type=int, default=200)
    parser.add_argument("--num-shots", type=int, default=8)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.7, help="of every second request")
    parser.add_argument("--parallel", type=int, default=32, help="requests at once")
    parser.add_argument("--other-parallel", type=int, default=4, help="of the second run without")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


def requests(args: argparse.Namespace) -> list[Asked]:
    tokenizer = Tokenizer.from_file(str(args.model_path / "tokenizer.json"))
    made = []
    for number, question in enumerate(questions(args.num_shots, args.num_questions, args.seed)):
        temperature = args.temperature if number % 2 else 0.0
        sampling = SamplingParams(64, temperature=temperature, seed=number)
        made.append(Asked(tokenizer.encode(question.prompt).ids, sampling))
    return made


def engine_of(
    args: argparse.Namespace, drafts: int, *, eager: bool = False, **changes: Any
) -> Engine:
    nextn = {"speculative_algorithm": "NEXTN", "speculative_num_steps": drafts} if drafts else {}
    settings: dict[str, Any] = {
        "model_path": str(args.model_path),
        "device": args.device,
        "dtype": args.dtype,
        "max_total_tokens": 65536,
        "max_running_requests": args.parallel,
        "cuda_graph_bs": ",".join(map(str, sorted({args.parallel, args.other_parallel, 1}))),
        "context_length": 2048,
        "piecewise_cuda_graph_max_tokens": 256,
        "disable_cuda_graph": eager,
    }
    return load_engine(WorkerConfig(**settings | nextn | changes))


def answer(engine: Engine, asked: Sequence[Asked], parallel: int) -> Answers:
    """Answers all requests, at most `parallel` at a time."""
    found = Answers([], [])
    recorder = Recorder(engine)
    script: list[ToScheduler] = [
        Generate(f"r{n}", one.prompt, one.sampling) for n, one in enumerate(asked)
    ]
    tokens: dict[str, list[int]] = {}
    for at in range(0, len(script), parallel):
        group = script[at : at + parallel]
        ran = run(
            {0: group},
            engine=engine,
            capacity=engine.capacity,
            vocab_size=engine.model.config.vocab_size,
            chunk_size=2048,
            use_prefix_cache=False,
        )
        tokens |= {m.rid: ran.channel.tokens(m.rid) for m in group if isinstance(m, Generate)}
    rows = recorder.close()
    for n, one in enumerate(asked):
        own = rows[tuple(one.prompt)]
        found.tokens.append(tokens[f"r{n}"])
        found.logits.append([own[len(one.prompt) + i] for i in range(len(tokens[f"r{n}"]))])
    return found


def scores(logits: Tensor, asked: Asked, position: int) -> Tensor:
    """Returns the scores [V] whose largest is the token at `position`."""
    sampling = asked.sampling
    if sampling.greedy:
        return logits
    noise = gumbel(torch.tensor([sampling.seed]), torch.tensor([position]), len(logits))[0]
    return logits / sampling.temperature + noise


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Returns the index of the first token that differs, None for equal answers."""
    pairs = enumerate(itertools.zip_longest(a, b))
    return next((at for at, (x, y) in pairs if x != y), None)


def compare(asked: Sequence[Asked], a: Answers, b: Answers) -> tuple[Row, list[Row]]:
    """Returns a summary of two runs, and a row for each answer that differs: at its first other token the gaps of the two
    best scores in each run, and the difference of the two runs' logits."""
    differing = list[Row]()
    largest, gaps = list[float](), list[float]()
    for n, one in enumerate(asked):
        at = first_difference(a.tokens[n], b.tokens[n])
        same = min(len(a.tokens[n]), len(b.tokens[n])) if at is None else at + 1
        for index in range(same):
            position = len(one.prompt) + index
            before, after = a.logits[n][index], b.logits[n][index]
            largest.append((before - after).abs().max().item())
            best = scores(before, one, position).topk(2).values
            gaps.append((best[0] - best[1]).item())
            if index != at:
                continue
            own, other = a.tokens[n][at], b.tokens[n][at]
            sa, sb = scores(before, one, position), scores(after, one, position)
            differing.append(
                {
                    "request": n,
                    "index": at,
                    "temperature": one.sampling.temperature,
                    "tokens": [own, other],
                    "gap": (sa[own] - sa[other]).item(),
                    "gap_other": (sb[other] - sb[own]).item(),
                    "largest_logit": before.abs().max().item(),
                    "logits_differ_by": largest[-1],
                }
            )
    largest.sort()
    summary = {
        "answers": len(asked),
        "differ": len(differing),
        "equal_share": 1 - len(differing) / len(asked),
        "tokens_compared": len(largest),
        "logits_differ_median": statistics.median(largest),
        "logits_differ_p99": largest[int(0.99 * (len(largest) - 1))],
        "logits_differ_max": largest[-1],
        "gap_median": statistics.median(gaps),
    }
    return summary, differing


def distances(asked: Sequence[Asked], run_: Answers, exact: Engine) -> dict[str, float]:
    """Returns the distance of the logits of answers from those of a float32 engine given the same tokens."""
    far = list[float]()
    for n, one in enumerate(asked[:100]):
        far += (
            (teacher_forced(exact, one, run_.tokens[n]) - torch.stack(run_.logits[n]))
            .abs()
            .amax(dim=1)
            .tolist()
        )
    far.sort()
    return {
        "median": statistics.median(far),
        "p99": far[int(0.99 * (len(far) - 1))],
        "max": far[-1],
    }


@torch.inference_mode()
def teacher_forced(engine: Engine, asked: Asked, tokens: list[int]) -> Tensor:
    """Returns the logits [len(tokens), V] of each of `tokens`, all computed as one chunk behind the prompt. `engine` has a
    drafter, so it computes the last layer of all rows."""
    launched = engine.forward(prefill_plan(engine, (*asked.prompt, *tokens[:-1])))
    logits = engine.model.logits(launched.hidden_states[len(asked.prompt) - 1 :])
    engine.sample(launched).wait()
    return logits.float().cpu()


def prefill_plan(engine: Engine, tokens: tuple[int, ...]) -> StepPlan:
    """Returns a step that computes `tokens` in slot 0."""
    pages = -(-(len(tokens) + 1 + engine.capacity.num_drafts) // engine.capacity.page_size)
    return StepPlan(
        (),
        (),
        (PrefillChunk(0, 0, tokens, is_last=True),),
        tuple((0, index, 1 + index) for index in range(pages)),
        (Admitted(0, SamplingParams(9), tokens),),
    )


class Stages:
    """Keeps the intermediate results of the first row of each layer, by name and in order."""

    def __init__(self, engine: Engine) -> None:
        self.found: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        for number, layer in enumerate(engine.model.model.layers):
            name = f"layer {number}"
            self._hooks += [
                layer.self_attn.register_forward_pre_hook(self._of(f"{name} norm, qkv_proj")),
                layer.self_attn.register_forward_hook(self._of(f"{name} attention, o_proj")),
                layer.register_forward_hook(self._of(f"{name} feed-forward")),
            ]

    def _of(self, name: str) -> Any:
        def keep(module: Any, inputs: Any, output: Any = None) -> None:
            del module
            kept = inputs[0] if output is None else output
            kept = kept[0] if isinstance(kept, tuple) else kept
            self.found[name] = kept[0].float().cpu()

        return keep

    def close(self) -> dict[str, Tensor]:
        for hook in self._hooks:
            hook.remove()
        return self.found


def decode_once(
    engine: Engine, asked: Asked, tokens: list[int], at: int, drafts: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the logits [V] of the token `at` of an answer, and the intermediate results of its row, in a step with
    `drafts` further rows: those of the answer's tokens."""
    known = (*asked.prompt, *tokens[: at - 1])  # the step's row has the token in front of `at`
    plan = prefill_plan(engine, known)
    pending = engine.sample(engine.forward(plan))
    pending.wait()
    state = engine.slots
    state.last_token[0] = tokens[at - 1]
    following = (tokens[at : at + drafts] + [0] * drafts)[:drafts]
    if drafts:
        state.drafts[0, :drafts] = torch.tensor(following, device=engine.device)
    bound = len(known) + 1 + drafts
    step = StepPlan((0,), (bound,), (), (), (), num_drafts=drafts)
    stages = Stages(engine)
    launched = engine.forward(step)
    found = stages.close()
    logits = launched.logits[0].float().cpu()
    engine.sample(launched).wait()
    return logits, found


def trace(engine: Engine, asked: Asked, tokens: list[int], at: int, drafts: int) -> Row:
    """Compares the row of one token in a step of one row and in one of 1 + `drafts` rows, behind the same KV cache."""
    alone, of_one = decode_once(engine, asked, tokens, at, 0)
    again, of_same = decode_once(engine, asked, tokens, at, 0)
    beside, of_many = decode_once(engine, asked, tokens, at, drafts)
    stages = []
    for name, row in of_one.items():
        far, scale = (row - of_many[name]).abs().max().item(), row.abs().max().item()
        stages.append({"stage": name, "differs_by": far, "largest": scale})
    different = [stage for stage in stages if stage["differs_by"]]
    position = len(asked.prompt) + at
    best = scores(alone, asked, position).topk(2)
    other = scores(beside, asked, position)
    first, second = best.indices.tolist()
    return {
        "repeats": bool(torch.equal(alone, again))
        and all(torch.equal(of_one[name], of_same[name]) for name in of_one),
        "first_stage": different[0] if different else None,
        "stages": [stage | {} for stage in stages[:3]] + stages[-1:],
        "logits_differ_by": (alone - beside).abs().max().item(),
        "best": [first, second],
        "gap_one_row": (best.values[0] - best.values[1]).item(),
        "gap_with_drafts": (other[first] - other[second]).item(),
    }


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    args = parse_args()
    asked = requests(args)
    plain = engine_of(args, 0)
    without = answer(plain, asked, args.parallel)
    again = answer(plain, asked, args.parallel)
    others = answer(plain, asked, args.other_parallel)
    del plain
    drafting = engine_of(args, args.drafts)
    with_drafts = answer(drafting, asked, args.parallel)
    del drafting
    result: Row = {
        "config": {
            n: v.name if isinstance(v, Path) else v for n, v in vars(args).items() if n != "out"
        }
    }
    rows = list[Row]()
    for name, other in (("repeated", again), ("batch size", others), ("drafts", with_drafts)):
        summary, differing = compare(asked, without, other)
        result[name] = summary
        rows += [{"against": name} | row for row in differing]
        print(name, rounded(summary))
    exact = engine_of(args, args.drafts, eager=True, dtype="float32")
    result["from_float32"] = {
        "without drafts": distances(asked, without, exact),
        "with drafts": distances(asked, with_drafts, exact),
    }
    of_drafts = [row for row in rows if row["against"] == "drafts" and row["index"]]
    chosen = [(row["request"], row["index"]) for row in of_drafts] or [(0, 1)]
    for row in rows:
        n, at = row["request"], row["index"]
        true = scores(
            teacher_forced(exact, asked[n], without.tokens[n][: at + 1])[-1],
            asked[n],
            len(asked[n].prompt) + at,
        )
        own, other_token = row["tokens"]
        row["gap_float32"] = (true[own] - true[other_token]).item()
    del exact
    eager = engine_of(args, args.drafts, eager=True)
    result["traced"] = [
        {"request": n, "index": at} | trace(eager, asked[n], without.tokens[n], at, args.drafts)
        for n, at in chosen[:4]
    ]
    result["differing"] = rows
    for row in rows:
        print(rounded(row))
    print(rounded(result["from_float32"]))
    for row in result["traced"]:
        print(rounded(row))
    record("speculation_rounding", rounded(result), args.out)


if __name__ == "__main__":
    main()
