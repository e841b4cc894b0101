"""Endpoints about the worker: health, load, settings, models, metrics."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from mla_router.worker.messages import Stats
from mla_router.worker.server.errors import InvalidRequest, Unavailable
from mla_router.worker.server.http.json_response import json_response
from mla_router.worker.server.state import STATE, ServerState


async def health(request: web.Request) -> web.Response:
    state = request.app[STATE]
    if not state.complete:
        return json_response({"status": "starting"}, status=503)
    if state.draining:
        return json_response({"status": "draining"}, status=503)
    healthy = state.healthy()
    said = {
        "status": "ok" if healthy else "stuck",
        "last_step_age": round(state.last_step_age(), 3),
        "has_work": state.heartbeat.has_work,
        **_dp_rank(state),
    }
    return json_response(said, status=200 if healthy else 503)


async def server_info(request: web.Request) -> web.Response:
    state = request.app[STATE]
    service = state.ready()
    config, limits, scheduler = service.config, service.limits, service.scheduler
    latest = await scheduler.stats()
    stats = stats_fields(latest)
    return json_response(
        {
            **config.settings(),
            # The values chosen for settings that were left open.
            **msgspec.structs.asdict(limits),
            "model_path": str(config.folder),
            "tokenizer_path": str(config.tokenizer_folder),
            "served_model_name": config.model_name,
            "worker_id": config.name,
            "boot_id": state.start_info.boot_id,
            # The worker itself holds back requests whose prefix another request is computing; a router need not.
            "in_batch_prefix_sharing": True,
            "version": package_version(),
            "uptime_s": time.monotonic() - state.start_info.started,
            "scheduler": stats,
            # SGLang's names and form; its benchmarks read the first entry.
            "internal_states": [
                {
                    **stats,
                    "last_gen_throughput": scheduler.latest_stats.throughput,
                    "load": stats["running"] + stats["waiting"],
                    "avg_spec_accept_length": latest.accept_length,
                    "effective_max_running_requests_per_dp": limits.max_running_requests,
                    "memory_usage": {"token_capacity": limits.max_total_num_tokens},
                }
            ],
        }
    )


async def load(request: web.Request) -> web.Response:
    """Returns the load at the scheduler's last statistics. Cheap, so it may be polled often."""
    state = request.app[STATE]
    reading = state.reading()
    if reading is None:
        raise Unavailable("The model is loading", code="starting", retry_after=1)
    stats = reading.stats
    return json_response(
        [
            {
                "dp_rank": state.config.attn_dp_rank,
                "num_reqs": stats.running + stats.waiting,
                "num_waiting_reqs": stats.waiting,
                "num_tokens": reading.used_tokens,
            }
        ]
    )


async def model_info(request: web.Request) -> web.Response:
    state = request.app[STATE].ready()
    config = state.config
    return json_response(
        {
            "model_path": str(config.folder),
            "tokenizer_path": str(config.tokenizer_folder),
            "served_model_name": config.model_name,
            "is_generation": True,
            "has_image_understanding": state.media is not None,
            "preferred_sampling_params": None,
        }
    )


async def embeddings(request: web.Request) -> web.Response:
    request.app[STATE].ready()
    raise InvalidRequest(
        "This model generates text; it has no embeddings", param="model", code="unsupported_model"
    )


async def metrics(request: web.Request) -> web.Response:
    body = request.app[STATE].metrics.render()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def stats_fields(stats: Stats) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.structs.asdict(stats)
    del fields["query"]
    return fields


def package_version() -> str:
    try:
        return version("mla-router")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


async def models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model(request.app[STATE])]})


async def model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.ready().check_model(request.match_info["model"])
    return json_response(_model(state))


def _dp_rank(state: ServerState) -> dict[str, Any]:
    """Returns the number of the DP rank, if there are several."""
    return {} if state.dp_rank is None else {"dp_rank": state.dp_rank}


def _model(state: ServerState) -> dict[str, Any]:
    name = state.config.model_name
    return {
        "id": name,
        "object": "model",
        "created": state.start_info.created,
        "owned_by": "mla-router",
        "root": name,
        "parent": None,
        "max_model_len": state.ready().limits.context_length,
        **_dp_rank(state),
    }
