"""The continuation of a broken stream: choices and requests advance to the tokens that the client has received."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from mla_router.worker.generation import FinishReason
from mla_router.worker.messages import Delta, Generate
from mla_router.worker.server.requests.choice import Choice, Finish, Output
from mla_router.worker.server.requests.replay import Replay, invalid_ids

TOKENS_PER_TURN = 1024  # tokens between two turns of the event loop: about 1 ms of detokenizing


async def resume(
    replay: Replay, choices: Sequence[Choice], requests: list[Generate], *, token_by_token: bool
) -> tuple[list[Output], list[Output]]:
    """Feeds the known tokens to `choices` and puts them into `requests`.

    Returns the outputs that the client has received, and the ends of choices that it has not received. Raises
    InvalidRequest.
    """
    received: list[Output] = []
    missing: list[Output] = []
    if replay.origin is not None:
        for choice, cached in zip(choices, replay.origin.cached_tokens, strict=False):
            choice.cached_tokens = cached
    for index, known in enumerate(replay.choices):
        choice, ids = choices[index], known.token_ids
        stop_ids = requests[index].sampling.stop_token_ids
        if len(ids) > choice.max_tokens:
            raise invalid_ids(index, f"{len(ids)} are more than the request may have")
        if not stop_ids.isdisjoint(ids[:-1]):
            raise invalid_ids(index, "go on after a token that ends the answer")
        if ids:
            received += await _feed(choice, ids, stop_ids, token_by_token=token_by_token)
        if known.finish_reason is not None and choice.finish is None:
            # An end without a token, such as an abort. The client also has the text that was held back.
            end = Delta(choice.rid, [], finish_reason=known.finish_reason)
            received.append(choice.advance(end))
        elif choice.finish is not None and known.finish_reason is not None:
            if choice.finish.reason != known.finish_reason:
                choice.finish = Finish(known.finish_reason)
            received.append(Output.end(index, choice.finish))
        elif choice.finish is not None:
            # The stream broke between the last token of the choice and the message of its end.
            missing.append(Output.end(index, choice.finish))
        choice.completion_tokens = len(ids)
        requests[index] = msgspec.structs.replace(requests[index], output=ids)
    return received, missing


async def _feed(
    choice: Choice, ids: list[int], stop_ids: frozenset[int], *, token_by_token: bool
) -> list[Output]:
    """Advances `choice` by known tokens, in turns of the event loop."""
    reason = ""
    if ids[-1] in stop_ids:
        reason = FinishReason.STOP.value
    elif len(ids) == choice.max_tokens:
        reason = FinishReason.LENGTH.value
    outputs: list[Output] = []
    for start in range(0, len(ids), TOKENS_PER_TURN):
        turn = ids[start : start + TOKENS_PER_TURN]
        is_last = start + len(turn) == len(ids)
        delta = Delta(choice.rid, turn, finish_reason=reason if is_last else "")
        outputs += choice.outputs_of(delta, token_by_token=token_by_token)
        if choice.finish is not None:
            break
        await asyncio.sleep(0)
    return outputs
