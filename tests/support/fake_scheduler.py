"""A scheduler process without a model. It speaks the real messages and follows the script in the salt of a request.

    python fake_scheduler.py RECORD [flags of a scheduler] --ipc-dir DIR

A request's `cache_salt` is its script in JSON; without a script the prompt is repeated. Each received message is
appended to the file RECORD as a JSON line, for the tests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from mla_router.worker.child import die_with_parent, ignore_stop_signals
from mla_router.worker.generation import Logprobs, SamplingParams
from mla_router.worker.messages import (
    Abort,
    Delta,
    Deltas,
    FlushCache,
    Generate,
    GetStats,
    Ready,
    Recorded,
    RecordExperts,
    Shutdown,
    StartProfile,
    Stats,
    StopProfile,
    ToScheduler,
    ToServer,
    scheduler_socket,
    server_socket,
)

CONTEXT_LENGTH = 1024
KV_TOKENS = 4096
PAGE_SIZE = 16
SLOTS = 128
VOCAB_SIZE = 4096
HEARTBEAT_MS = 100


class Script(msgspec.Struct):
    # Tokens of the answer, repeated as needed; None: the prompt.
    say: list[int] | None = None
    say_from: str | None = None  # a file beside RECORD with these tokens, because salts are short
    by_seed: list[list[int]] | None = None  # one answer for each seed
    cached: int = 0  # prompt tokens that are reported as cached
    burst: int = 1  # tokens a step
    hold_after: int | None = None  # stop sending after this number of tokens
    hold_own_after: int | None = None  # the same, unless the request continues an answer
    # Fail with this error: at once, or with `hold_after` when the cache is flushed.
    error: str = ""
    refuse: str = ""  # refuse the request with this message
    die_after: int | None = None  # end this process after this number of tokens
    # The length of the prompt for which the script is; other requests stop after one token.
    only: int | None = None
    silent: bool = False  # send no heartbeats from now on
    token_s: float | None = None  # `Stats.token_s` of heartbeats from now on


@dataclass
class Request:
    generate: Generate
    script: Script
    said: int = 0
    released: bool = False

    def say(self) -> tuple[list[int], str]:
        """Returns the tokens of the next step, and the reason of the end; empty: it goes on."""
        script, sampling = self.script, self.generate.sampling
        answer = script.say or self.generate.prompt
        if script.by_seed:
            answer = script.by_seed[sampling.seed % len(script.by_seed)]
        tokens: list[int] = []
        while len(tokens) < script.burst:
            tokens.append(answer[self.said % len(answer)])
            self.said += 1
            if tokens[-1] in sampling.stop_token_ids:
                return tokens, "stop"
            if self.said == sampling.max_tokens:
                return tokens, "length"
            if self.said in (script.hold_after, script.die_after):
                break
        return tokens, ""


@dataclass
class FakeScheduler:
    inbox: zmq.Socket[bytes]
    outboxes: list[zmq.Socket[bytes]]  # one a server
    record: Path
    requests: dict[str, Request] = field(default_factory=dict)
    steps: int = 0
    generated: int = 0
    silent: bool = False
    token_s: float = 0.0

    def send(self, message: ToServer, *servers: int) -> None:
        """Sends to `servers`, or to all by default."""
        for server in servers or range(len(self.outboxes)):
            self.outboxes[server].send(msgspec.msgpack.encode(message))

    def stats(self, query: int = 0, *servers: int) -> None:
        used = len(self.requests)
        self.send(
            Stats(
                query=query,
                running=used,
                waiting=0,
                total_pages=KV_TOKENS // PAGE_SIZE,
                free_pages=KV_TOKENS // PAGE_SIZE - used,
                cached_pages=0,
                total_slots=SLOTS,
                free_slots=SLOTS - used,
                steps=self.steps,
                prompt_tokens=0,
                cached_tokens=0,
                generated_tokens=self.generated,
                retracted=0,
                token_s=self.token_s,
            ),
            *servers,
        )

    def run(self) -> None:
        heartbeat_at = 0.0
        decoder = msgspec.msgpack.Decoder(ToScheduler)
        while True:
            now = time.monotonic()
            if now >= heartbeat_at and not self.silent:
                self.stats()
                heartbeat_at = now + HEARTBEAT_MS / 1000
            busy = any(not self.holds(request) for request in self.requests.values())
            while self.inbox.poll(0 if busy else HEARTBEAT_MS):
                message = decoder.decode(self.inbox.recv())
                if isinstance(message, Shutdown):
                    return
                self.receive(message)
                busy = True
            if self.requests:
                self.step()

    def receive(self, message: ToScheduler) -> None:
        with self.record.open("ab") as file:
            file.write(msgspec.json.encode(message) + b"\n")
        if isinstance(message, Generate):
            salt = message.cache_salt
            script = msgspec.json.decode(salt, type=Script) if salt.startswith("{") else Script()
            if script.say_from is not None:
                script.say = json.loads(self.record.with_name(script.say_from).read_text())
            if script.only not in (None, len(message.prompt)):
                script = Script(hold_after=1)
            self.requests[message.rid] = Request(message, script, said=len(message.output))
            self.silent = self.silent or script.silent
            if script.token_s is not None:
                self.token_s = script.token_s
                self.stats()
        elif isinstance(message, Abort):
            self.requests.pop(message.rid, None)
        elif isinstance(message, GetStats | FlushCache):
            for request in self.requests.values():
                request.released |= isinstance(message, FlushCache) and bool(request.script.error)
            self.stats(message.query, message.server)
        elif isinstance(message, StartProfile | StopProfile | RecordExperts):
            self.send(Recorded(message.query, problem="this scheduler is a fake"), message.server)

    def holds(self, request: Request) -> bool:
        after = request.script.hold_after
        if not request.generate.output and request.script.hold_own_after is not None:
            after = request.script.hold_own_after
        return after is not None and request.said >= after and not request.released

    def step(self) -> None:
        deltas = defaultdict(list)
        for request in list(self.requests.values()):
            if not self.holds(request):
                deltas[request.generate.server].append(self.delta(request))
        self.steps += 1
        for server, items in deltas.items():
            self.send(Deltas(items), server)

    def delta(self, request: Request) -> Delta:
        generate, script = request.generate, request.script
        if script.die_after is not None and request.said >= script.die_after:
            for outbox in self.outboxes:
                outbox.close()
            self.inbox.close()
            self.inbox.context.term()  # waits until the earlier messages are sent
            os._exit(9)
        if script.refuse:
            return Delta(generate.rid, [], finish_reason="refused", error=script.refuse)
        if script.error and request.said >= (script.hold_after or 0):
            del self.requests[generate.rid]
            return Delta(generate.rid, [], finish_reason="error", error=script.error)
        begins = request.said == len(generate.output)
        tokens, reason = request.say()
        self.generated += len(tokens)
        if reason:
            del self.requests[generate.rid]
        sampling = generate.sampling
        logprobs = logprobs_of(tokens, sampling) if sampling.logprobs else None
        prompt_logprobs = None
        if begins and sampling.prompt_logprobs_from is not None:
            prompt_logprobs = logprobs_of(
                generate.prompt[sampling.prompt_logprobs_from :], sampling
            )
        return Delta(
            generate.rid,
            tokens,
            logprobs,
            script.cached,
            reason,
            prompt_logprobs=prompt_logprobs,
            queue_seconds=1e-3 if begins else 0.0,
        )


def logprobs_of(tokens: list[int], sampling: SamplingParams) -> Logprobs:
    """Returns logprobs that identify the tokens. The top tokens are the next ones of the vocabulary."""
    top = range(sampling.top_logprobs)
    return Logprobs(
        [-token / 1024 for token in tokens],
        [[(token + rank) % VOCAB_SIZE for rank in top] for token in tokens] if top else [],
        [[-rank / 8 for rank in top] for _ in tokens] if top else [],
    )


def main() -> None:
    (parent,) = [flag.split("=")[1] for flag in sys.argv if flag.startswith("--parent-pid=")]
    die_with_parent(int(parent))
    ignore_stop_signals()
    record, directory = Path(sys.argv[1]), sys.argv[sys.argv.index("--ipc-dir") + 1]
    servers = [
        flag.split("=")[1] for flag in sys.argv if flag.startswith("--tokenizer-worker-num=")
    ]
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.bind(scheduler_socket(directory))
    outboxes = [context.socket(zmq.PUSH) for _ in range(int(servers[0]) if servers else 1)]
    for server, outbox in enumerate(outboxes):
        outbox.connect(server_socket(directory, server))
    with record.open("a") as file:
        file.write(json.dumps(["Start", os.getpid(), directory]) + "\n")
    scheduler = FakeScheduler(inbox, outboxes, record)
    scheduler.send(
        Ready(
            KV_TOKENS,
            PAGE_SIZE,
            SLOTS,
            CONTEXT_LENGTH,
            VOCAB_SIZE,
            "cpu",
            "float32",
            "float32",
            "torch",
        )
    )
    scheduler.run()


if __name__ == "__main__":
    main()
