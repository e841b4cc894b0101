"""Endpoints that change the worker: /abort_request, /flush_cache, /start_profile, /stop_profile, and
/start_expert_distribution_record, /stop_..., /dump_....

A profile is a trace of the scheduler's steps. The operator chooses its folder (`--profile-dir`), the client only the
number of steps. A record of the load of experts has its own folder.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from mla_router.worker.messages import Recorded
from mla_router.worker.server.endpoints.info import stats_fields
from mla_router.worker.server.errors import InternalError, InvalidField, InvalidRequest
from mla_router.worker.server.http.json_response import json_response
from mla_router.worker.server.http.parsed_body import read_parsed
from mla_router.worker.server.schema.native import AbortRequest, StartProfileRequest
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.state import STATE

DEFAULT_STEPS = 100
MAX_STEPS = 1000  # the trace is in memory until it is written


_abort_decoder = msgspec.json.Decoder(AbortRequest)
_profile_decoder = msgspec.json.Decoder(StartProfileRequest)


async def flush_cache(request: web.Request) -> web.Response:
    stats = await request.app[STATE].ready().scheduler.flush_cache()
    return json_response({"success": True, "scheduler": stats_fields(stats)})


async def abort_request(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = await read_parsed(request, _abort_decoder)
    service = state.ready()
    if body.abort_all:
        return json_response({"aborted": await service.names.abort_all()})
    if body.rid is None:
        raise InvalidField("rid", "name the request, or set abort_all")
    return json_response({"aborted": await service.names.abort(body.rid)})


async def start_profile(request: web.Request) -> web.Response:
    service = request.app[STATE].ready()
    body = await read_parsed(request, _profile_decoder, empty=b"{}")
    refuse_unsupported(body)
    num_steps = DEFAULT_STEPS if body.num_steps is None else body.num_steps
    if not 1 <= num_steps <= MAX_STEPS:
        raise InvalidField("num_steps", f"must be between 1 and {MAX_STEPS}")
    _check(await service.scheduler.start_profile(num_steps), "profile")
    return json_response({"success": True, "num_steps": num_steps})


async def stop_profile(request: web.Request) -> web.Response:
    answer = _check(await request.app[STATE].ready().scheduler.stop_profile(), "profile")
    return json_response({"success": True, "file": answer.file})


async def start_expert_record(request: web.Request) -> web.Response:
    _check(await request.app[STATE].ready().scheduler.record_experts("start"), "record")
    return json_response({"success": True})


async def stop_expert_record(request: web.Request) -> web.Response:
    _check(await request.app[STATE].ready().scheduler.record_experts("stop"), "record")
    return json_response({"success": True})


async def dump_expert_record(request: web.Request) -> web.Response:
    answer = _check(await request.app[STATE].ready().scheduler.record_experts("dump"), "record")
    return json_response({"success": True, "file": answer.file})


def _check(answer: Recorded, what: str) -> Recorded:
    """Raises InvalidRequest, or InternalError for a fault of this worker, if there is no `what`. The message may quote an
    OSError: only operators use these endpoints."""
    if answer.problem:
        error = InternalError if answer.failed else InvalidRequest
        raise error(f"No {what}: {answer.problem}", code=f"{what}_failed")
    return answer
