"""/openapi.json, checked by random requests of schemathesis."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
)

from mla_router.worker.config import SMALL_MODEL, WorkerConfig
from mla_router.worker.server.app import make_app
from mla_router.worker.server.endpoints.openapi import document
from mla_router.worker.server.routes import ROUTES
from mla_router.worker.server.state import ServerState
from support.examples import examples
from support.fake_worker import FakeWorker
from support.processes import EVENT_TIMEOUT_S, get_json

# Without the check that every fitting body is accepted: the types do not contain all limits.
PROMISES = [not_a_server_error, content_type_conformance, response_schema_conformance]


OPERATIONS = [
    result.ok() for result in schemathesis.openapi.from_dict(document(ROUTES)).get_all_operations()
]


DRAWN = [one for one in OPERATIONS if one.body or one.path_parameters]
FIXED = [one for one in OPERATIONS if one not in DRAWN]


@pytest.mark.parametrize("operation", DRAWN, ids=lambda operation: operation.label)
@given(data=st.data())
@examples(8, suppress_health_check=list(HealthCheck))
def test_random_requests(
    worker: FakeWorker, operation: APIOperation[Any, Any, Any, Any], data: st.DataObject
) -> None:
    case = data.draw(operation.as_strategy())
    case.call_and_validate(base_url=worker.url, checks=PROMISES, timeout=EVENT_TIMEOUT_S)


@pytest.mark.parametrize("operation", FIXED, ids=lambda operation: operation.label)
@given(data=st.data())
@examples(4, suppress_health_check=list(HealthCheck))
def test_requests_without_parameters(
    worker: FakeWorker, operation: APIOperation[Any, Any, Any, Any], data: st.DataObject
) -> None:
    """These requests have no parameters to vary, so few examples are enough."""
    case = data.draw(operation.as_strategy())
    case.call_and_validate(base_url=worker.url, checks=PROMISES, timeout=EVENT_TIMEOUT_S)


def test_every_route_is_described(worker: FakeWorker) -> None:
    app = make_app(ServerState(WorkerConfig(str(SMALL_MODEL))))
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    document = get_json(worker.url + "/openapi.json")
    described = {(method, path) for path, item in document["paths"].items() for method in item}
    assert served == described


def test_refused_fields_are_not_in_the_document(worker: FakeWorker) -> None:
    document = get_json(worker.url + "/openapi.json")
    fields = document["components"]["schemas"]["GenerateRequest"]["properties"]
    assert {"text", "input_ids", "sampling_params", "stream"} <= set(fields)
    assert {"lora_path", "audio_data", "session_params"}.isdisjoint(fields)
