"""Latency and throughput of a running server, with the options and the report of SGLang's benchmark.

    python bench/serving/bench_serving.py --base-url http://127.0.0.1:30000 \\
        --random-input-len 512 --random-output-len 64 --random-range-ratio 1 --max-concurrency 8

The server is any OpenAI-compatible one, or SGLang's `/generate` with `--backend sglang`. The key is in the
environment, as OPENAI_API_KEY. Exits with 1 if a request failed; the report lists the failures.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadgen import arguments, crowd, metrics, report, sharegpt, traffic, workload
from loadgen.apis import RequestOptions
from loadgen.client import Outcome, open_session
from loadgen.crowd import ClientError
from loadgen.server import Server, ServerError
from loadgen.tokens import TokenizerError, Vocabulary
from loadgen.workload import Conversation, Lengths, Turn, WorkloadError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

WARMUP_OUTPUT_TOKENS = 32


def conversations_of(
    args: argparse.Namespace, vocabulary: Vocabulary, rng: random.Random
) -> list[Conversation]:
    if args.dataset_name == "sharegpt":
        pairs = sharegpt.read(args.dataset_path)
        return sharegpt.conversations(
            vocabulary, rng, pairs, args.num_prompts, args.sharegpt_output_len
        )
    if args.dataset_name == "generated-shared-prefix":
        return workload.shared_prefix(
            vocabulary,
            rng,
            groups=args.gsp_num_groups,
            prompts_per_group=args.gsp_prompts_per_group,
            system_tokens=args.gsp_system_prompt_len,
            question_tokens=args.gsp_question_len,
            output_tokens=args.gsp_output_len,
        )
    if args.dataset_name == "multi-turn":
        return workload.multi_turn(
            vocabulary,
            rng,
            args.num_prompts,
            rounds=args.multi_turn_rounds,
            system_tokens=args.multi_turn_system_prompt_len,
            input_tokens=args.multi_turn_input_len,
            output_tokens=args.multi_turn_output_len,
        )
    lengths = Lengths(args.random_input_len, args.random_output_len, args.random_range_ratio)
    texts = None
    if args.dataset_path is not None:
        questions = [question for question, _ in sharegpt.read(args.dataset_path)]
        texts = [ids for text in questions if (ids := vocabulary.encode(text).ids)]
    return workload.random_prompts(vocabulary, rng, args.num_prompts, lengths, texts)


async def warm_up(target: crowd.Target, vocabulary: Vocabulary, first: Turn, count: int) -> None:
    """Sends other prompts first, so that the measured ones are not cached."""
    rng = random.Random()
    tokens = min(first.output_tokens, WARMUP_OUTPUT_TOKENS)
    turns = [Turn(vocabulary.draw(rng, len(first.prompt.ids)), tokens) for _ in range(count)]
    outcomes: list[Outcome] = []
    await target.send([(turn,) for turn in turns], [0.0] * count, None, outcomes.append)
    for outcome in outcomes:
        if not outcome.ok:
            raise ServerError(f"The warm-up failed: {outcome.error}")


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    key = os.environ.get("OPENAI_API_KEY")
    async with open_session(key, args.request_timeout) as http:
        server = Server(http, args.base_url)
        options = RequestOptions(
            model=args.model or await server.model(),
            stream=not args.disable_stream,
            ignore_eos=not args.disable_ignore_eos,
            token_ids=args.tokenize_prompt,
            extra=args.extra_request_body,
        )
        vocabulary = Vocabulary(args.tokenizer or Path(await server.tokenizer()))
        rng = random.Random(args.seed)
        conversations = conversations_of(args, vocabulary, rng)
        target = crowd.Target(args.base_url, args.backend, options, args.request_timeout)
        due = list(traffic.arrivals(rng, len(conversations), args.request_rate))
        await warm_up(target, vocabulary, conversations[0][0], args.warmup_requests)
        if args.flush_cache:
            await server.flush_cache()
        if args.profile:
            await server.start_profile()
        gc.collect()
        gc.freeze()  # a garbage collection would visit all prompts while answers wait
        with tqdm(total=sum(map(len, conversations)), disable=args.disable_tqdm) as bar:
            outcomes: list[Outcome] = []

            def keep(outcome: Outcome) -> None:
                outcomes.append(outcome)
                bar.update()

            load = conversations, due, args.max_concurrency
            if args.client_processes == 1:
                cpu, start = time.process_time(), time.perf_counter()
                await target.send(*load, keep)
                duration, cpu = time.perf_counter() - start, time.process_time() - cpu
            else:
                shares = crowd.share_out(target, *load, args.client_processes)
                duration, cpu = await asyncio.to_thread(crowd.run, shares, keep)
        if args.profile:
            await server.stop_profile()
    return {
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "max_concurrency": args.max_concurrency,
        **metrics.summarise(outcomes, duration, vocabulary.count),
        "client_cpu_share": cpu / duration,
        "turns": metrics.by_turn(outcomes),
    }


def main() -> None:
    args = arguments.parse(__doc__.partition("\n")[0])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each open request has a socket
    try:
        result = asyncio.run(measure(args))
    except (ClientError, ServerError, TokenizerError, WorkloadError) as error:
        sys.exit(f"bench_serving: {error}")
    print(report.table(result))
    record("bench_serving", result, args.output_file)
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
