"""The middlewares: ids, keys, content types, error shape."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mla_router.worker.config import SMALL_MODEL, WorkerConfig
from mla_router.worker.server.app import OPEN_PATHS, make_app
from mla_router.worker.server.state import ServerState
from support.fake_worker import FakeWorker, fake_worker, script
from support.processes import wait_until

JSON = {"Content-Type": "application/json"}
GENERATING = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
}
BODY = b'{"text": "a", "sampling_params": {"max_new_tokens": 1}}'


def ask(
    worker: FakeWorker,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, http.client.HTTPMessage, Any]:
    connection = http.client.HTTPConnection(worker.url.removeprefix("http://"))
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        text = response.read()
        is_json = text and response.headers.get_content_type() == "application/json"
        return response.status, response.headers, json.loads(text) if is_json else text
    finally:
        connection.close()


@pytest.fixture(scope="module")
def locked() -> Iterator[FakeWorker]:
    with fake_worker(api_key="s3cret", log_requests=True) as worker:
        yield worker


def test_ids(worker: FakeWorker) -> None:
    _, headers, _ = ask(worker, "GET", "/health", headers={"X-Request-Id": "abc-1.2:x_Y"})
    assert headers["x-request-id"] == "abc-1.2:x_Y"
    for insane in ("a b", "x" * 129, "<script>", "é", ""):
        _, headers, _ = ask(worker, "GET", "/health", headers={"X-Request-Id": insane})
        assert len(headers["x-request-id"]) == 32
        assert headers["x-request-id"].isalnum()
    assert headers["x-mla-worker"] == worker.url.removeprefix("http://")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/embeddings", 400),
        ("POST", "/v1/moderations", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/gpt-4o", 404),
    ],
)
def test_errors_have_openais_shape(worker: FakeWorker, method: str, path: str, status: int) -> None:
    got, headers, body = ask(worker, method, path)
    assert got == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert headers["x-request-id"]
    if status == 405:
        assert f"takes {headers['Allow']}, not {method}" in body["error"]["message"]
        assert body["error"]["code"] == "method_not_allowed"
    elif status == 404 and "gpt-4o" not in path:
        assert body["error"]["message"] == f"unknown path: {path}"
        assert body["error"]["code"] == "unknown_path"


@pytest.mark.parametrize(
    ("path", "given", "missing"),
    [
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": [{}]}, "messages[0].role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ("/v1/completions", {}, "prompt"),
        ("/v1/responses", {}, "input"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, "max_tokens"),
    ],
)
def test_a_missing_field_has_its_own_code(
    worker: FakeWorker, path: str, given: dict[str, Any], missing: str
) -> None:
    status, _, body = ask(worker, "POST", path, json.dumps(given).encode())
    assert status == 400
    error = body["error"]
    assert (error["param"], error["code"]) == (missing, "missing_required_parameter")


def test_an_empty_body_is_called_empty(worker: FakeWorker) -> None:
    status, _, body = ask(worker, "POST", "/v1/chat/completions", b"")
    assert status == 400
    assert body["error"]["message"] == "The body is empty; send a JSON object"


def test_content_types(worker: FakeWorker) -> None:
    for kind in ("application/json", "application/json; charset=utf-8", "application/x+json"):
        assert ask(worker, "POST", "/generate", BODY, {"Content-Type": kind})[0] == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        status, _, body = ask(worker, "POST", "/generate", BODY, {"Content-Type": kind})
        assert status == 415
        assert "application/json" in body["error"]["message"]


def test_every_route_but_the_open_ones_needs_the_key(locked: FakeWorker) -> None:
    """Tests all routes in the table, including new ones."""
    app = make_app(ServerState(WorkerConfig(str(SMALL_MODEL))))
    routes = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None
    }
    assert len(routes) > 10
    for method, path in routes:
        body = b"{}" if method == "POST" else None
        for key in (None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic s3cret", "s3cret"):
            headers = JSON | ({} if key is None else {"Authorization": key})
            status, _, _ = ask(locked, method, path.replace("{model}", "mla-small"), body, headers)
            assert (status != 401) == (path in OPEN_PATHS), (method, path, key, status)
    for trick in ("//health/../generate", "/health%2f..%2fgenerate", "/Health", "/nothing"):
        assert ask(locked, "GET", trick)[0] == 401


ADMIN = [("POST", "/flush_cache"), ("POST", "/abort_request"), ("POST", "/stop_profile")]


def test_admin_routes_need_the_admin_key() -> None:
    """The same as in the router."""
    with fake_worker(api_key="s3cret", admin_api_key="caliph") as worker:
        for method, path in ADMIN:
            client, admin = (JSON | {"Authorization": f"Bearer {k}"} for k in ("s3cret", "caliph"))
            assert ask(worker, method, path, b"{}", client)[0] == 401, path
            assert ask(worker, method, path, b"{}", admin)[0] not in (401, 403), path
        for key in ("s3cret", "caliph"):
            headers = JSON | {"Authorization": f"Bearer {key}"}
            assert ask(worker, "POST", "/generate", BODY, headers)[0] == 200
    with fake_worker(admin_api_key="caliph") as worker:
        assert ask(worker, "POST", "/generate", BODY, JSON)[0] == 200, (
            "it protects the worker alone"
        )
        assert ask(worker, "POST", "/flush_cache", b"{}", JSON)[0] == 401


FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Host": "evil.example:31000"},
    {"Host": "evil.example", "Origin": "http://evil.example"},
    {"Host": "\xff.example"},  # not UTF-8
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_web_pages_of_other_sites_may_send_nothing(
    worker: FakeWorker, locked: FakeWorker, headers: dict[str, str]
) -> None:
    for method, path in [*ADMIN, ("POST", "/generate")]:
        # Without a type, as from a blob
        status, _, body = ask(worker, method, path, b"{}", headers)
        assert status == 403, path
        assert body["error"]["code"] in ("origin_not_allowed", "host_not_allowed")
    assert ask(worker, "GET", "/health", None, headers)[0] == 200
    # Pages of other sites do not have the key.
    keyed = headers | JSON | {"Authorization": "Bearer s3cret"}
    assert ask(locked, "POST", "/generate", BODY, keyed)[0] == 200


def test_own_names(worker: FakeWorker) -> None:
    for host in ("localhost", "127.0.0.1:1", "[::1]:2", socket.gethostname()):
        headers = JSON | {"Host": host, "Origin": f"http://{host}"}
        assert ask(worker, "POST", "/generate", BODY, headers)[0] == 200, host


def test_with_the_key(locked: FakeWorker) -> None:
    for scheme in ("Bearer", "bearer"):
        headers = JSON | {"Authorization": f"{scheme} s3cret"}
        assert ask(locked, "POST", "/generate", BODY, headers)[0] == 200
        assert ask(locked, "GET", "/get_server_info", headers=headers)[0] == 200


def test_the_key_as_anthropics_clients_send_it(locked: FakeWorker) -> None:
    for key, status in (("s3cret", 200), ("wrong", 401), ("", 401), ("Bearer s3cret", 401)):
        assert ask(locked, "POST", "/generate", BODY, JSON | {"x-api-key": key})[0] == status, key
    wrong = JSON | {"x-api-key": "s3cret", "Authorization": "Bearer wrong"}
    assert ask(locked, "POST", "/generate", BODY, wrong)[0] == 401


def test_the_key_is_not_shown(locked: FakeWorker) -> None:
    ask(locked, "POST", "/generate", BODY, JSON | {"Authorization": "Bearer s3cret"})
    assert "s3cret" not in locked.running.output()


def test_head_is_get_without_a_body(locked: FakeWorker) -> None:
    for path, status in (("/health", 200), ("/metrics", 401), ("/generate", 401)):
        got, _, body = ask(locked, "HEAD", path)
        assert (got, body) == (status, b""), path
    key = {"Authorization": "Bearer s3cret"}
    for path in ("/v1/models", "/metrics"):
        assert ask(locked, "HEAD", path, headers=key)[::2] == (200, b"")
    assert ask(locked, "HEAD", "/generate", headers=key)[0] == 405


def test_a_long_path_is_short_in_the_log(locked: FakeWorker) -> None:
    assert ask(locked, "POST", "/" + "a" * 5000)[0] == 401
    wait_until(lambda: "/aaaa" in locked.running.output(), "the line of the request")
    assert max(map(len, locked.running.output().splitlines())) < 400


def test_connections_are_kept(worker: FakeWorker) -> None:
    connection = http.client.HTTPConnection(worker.url.removeprefix("http://"))
    local = None
    for _ in range(3):
        connection.request("POST", "/generate", BODY, JSON)
        connection.getresponse().read()
        assert isinstance(connection.sock, socket.socket)
        assert local in (None, connection.sock.getsockname())
        local = connection.sock.getsockname()
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_headers_for_the_router(worker: FakeWorker, path: str, stream: bool) -> None:
    """Every answer has the headers of prompt tokens and cached tokens; an error has none."""
    body: dict[str, Any] = {"model": "mla-small", "stream": stream, **GENERATING[path]}
    status, headers, answer = ask(
        worker, "POST", path, json.dumps(body | {"cache_salt": script(cached=1)}).encode(), JSON
    )
    assert status == 200, answer
    assert int(headers["x-mla-prompt-tokens"]) >= 2
    assert headers["x-mla-cached-tokens"] == "1"
    for wrong in ({"cache_salt": script(error="broken")}, {"cache_salt": "s" * 1000}):
        status, headers, _ = ask(worker, "POST", path, json.dumps(body | wrong).encode(), JSON)
        assert status in (400, 500)
        assert not [name for name in headers if name.lower().endswith("-tokens")]
