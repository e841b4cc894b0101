//! The admin routes.

use std::sync::Arc;

use http::{Method, StatusCode};
use mla_router::{Config, fleet::Phase, policy::Reason};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::support::{Client, FakeWorker, Raw, Reply, all_in, config, request, router, secs, soon};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_are_added_listed_and_removed() {
    let first = FakeWorker::plain().await;
    let second = FakeWorker::plain().await;
    let router = router(config(), &[&first]).await;
    let mut client = Client::connect(router.local_addr()).await;

    let added = client.post("/workers", json!({ "url": second.url() }).to_string()).await;
    assert_eq!(added.status, StatusCode::ACCEPTED);
    all_in(Phase::Healthy, &router).await;
    let listed = client.get("/workers").await.json();
    assert_eq!(listed["total"], 2);
    assert_eq!(listed["workers"][1]["url"], second.url());
    assert_eq!(listed["workers"][1]["healthy"], true);
    assert_eq!(
        client.get("/list_workers").await.json(),
        json!({ "urls": [first.url(), second.url()] })
    );

    let again = client.post(&format!("/add_worker?url={}", second.url()), "").await;
    assert_eq!(
        (again.status, again.error_code().as_str()),
        (StatusCode::CONFLICT, "worker_exists")
    );

    let path = format!("/workers?url={}", first.url());
    let removed = client.call(request(Method::DELETE, &path, "")).await.expect("an answer");
    assert_eq!(removed.status, StatusCode::OK);
    let removed = client.post(&format!("/remove_worker?url={}", second.url()), "").await;
    assert_eq!(removed.status, StatusCode::OK);
    assert_eq!(client.get("/list_workers").await.json(), json!({ "urls": [] }));
    let unknown = client.post(&format!("/remove_worker?url={}", second.url()), "").await;
    assert_eq!(
        (unknown.status, unknown.error_code().as_str()),
        (StatusCode::NOT_FOUND, "worker_unknown")
    );
    assert_eq!(client.get("/readiness").await.status, StatusCode::SERVICE_UNAVAILABLE);

    let added = client.post(&format!("/add_worker?url={}", first.url()), "").await;
    assert_eq!(added.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_worker_url_is_refused_and_named() {
    let router = router(config(), &[]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for path in [
        "/add_worker",
        "/add_worker?url=",
        "/add_worker?url=ftp://w1",
        "/add_worker?url=http://w1/path",
        "/add_worker?url=http://user:pw@w1",
        "/add_worker?url=file:///etc/passwd",
        "/remove_worker?url=x",
    ] {
        let answer = client.post(path, "").await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{path}");
        assert_eq!(answer.json()["error"]["param"], "url");
    }
    for body in ["", "{}", "[]", "{\"url\":3}", "{\"url\":\"w1:8000\"}"] {
        let answer = client.post("/workers", body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
        assert_eq!(answer.json()["error"]["param"], "url");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abort_is_sent_to_all_workers_and_one_success_suffices() {
    let mut knows = FakeWorker::plain().await;
    let mut other = FakeWorker::start(|_| Reply::status(404)).await;
    let router = router(config(), &[&other, &knows]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let answer = client.post("/abort_request", r#"{"rid":"r1"}"#).await;
    assert_eq!(answer.status, StatusCode::OK);
    let workers = &answer.json()["workers"];
    assert_eq!((&workers[0]["status"], &workers[1]["status"]), (&json!(404), &json!(200)));
    for worker in [&mut knows, &mut other] {
        let seen = worker.request().await;
        assert_eq!(
            (seen.head.uri.path(), &seen.body[..]),
            ("/abort_request", &br#"{"rid":"r1"}"#[..])
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn profiles_and_expert_records_are_sent_to_all_workers_and_a_refusal_is_reported() {
    let mut able = FakeWorker::plain().await;
    let mut unable = FakeWorker::start(|_| Reply::status(404)).await;
    let router = router(config(), &[&able, &unable]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for path in [
        "/start_profile",
        "/stop_profile",
        "/start_expert_distribution_record",
        "/stop_expert_distribution_record",
        "/dump_expert_distribution_record",
    ] {
        let answer = client.post(path, "").await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{path}");
        let workers = &answer.json()["workers"];
        assert_eq!((&workers[0]["status"], &workers[1]["status"]), (&json!(200), &json!(404)));
        for worker in [&mut able, &mut unable] {
            assert_eq!(worker.request().await.head.uri.path(), path);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flush_fails_if_one_worker_fails() {
    let good = FakeWorker::plain().await;
    let mut dead = FakeWorker::plain().await;
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[&good, &dead]).await;
    dead.kill().await;
    let answer = Client::connect(router.local_addr()).await.post("/flush_cache", "").await;
    assert_eq!(answer.status, StatusCode::BAD_GATEWAY);
    let body = answer.json();
    assert_eq!(body["success"], false);
    assert_eq!(body["workers"][0]["status"], 200);
    assert_eq!(body["workers"][1]["status"], Value::Null);
    assert_eq!(body["workers"][1]["url"], dead.url());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_tree_forgets_a_flushed_cache_although_the_client_has_left() {
    let gate = Arc::new(Semaphore::new(0));
    let opens = Arc::clone(&gate);
    let mut worker = FakeWorker::start(move |seen| match seen.head.uri.path() {
        "/flush_cache" => Reply::When(Arc::clone(&opens)),
        _ => Reply::good(),
    })
    .await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let prompt = json!({ "prompt": "x".repeat(1000) }).to_string();
    assert_eq!(client.post("/v1/completions", prompt).await.status, StatusCode::OK);
    worker.request().await;
    let state = router.router();
    let owned = || state.tree.owned_by(state.registry.replicas()[0].id);
    assert!(owned() > 0);
    let flush = b"POST /flush_cache HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n";
    let leaving = Raw::send(router.local_addr(), flush).await;
    worker.request().await;
    drop(leaving);
    let until = async |holds: &dyn Fn() -> bool| {
        while !holds() {
            tokio::task::yield_now().await;
        }
    };
    soon(until(&|| state.metrics.client_connections.get() == 1)).await;
    gate.add_permits(1);
    soon(until(&|| owned() == 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_info_has_all_workers() {
    let mut workers = Vec::new();
    for number in 0..2 {
        let worker = FakeWorker::plain().await;
        worker.set_info(&format!(
            r#"{{"boot_id":"b{number}","model_path":"m","internal_states":[{{"last_gen_throughput":{number}}}]}}"#
        ));
        workers.push(worker);
    }
    let router = router(config(), &[&workers[0], &workers[1]]).await;
    let info = Client::connect(router.local_addr()).await.get("/get_server_info").await.json();
    assert_eq!(info["router"]["policy"], "cache_aware");
    assert_eq!(
        info["internal_states"],
        json!([{"last_gen_throughput": 0}, {"last_gen_throughput": 1}])
    );
    assert_eq!(info["workers"][1]["url"], workers[1].url());
    assert_eq!(info["workers"][1]["model_path"], "m");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_has_its_own_path() {
    let workers = [FakeWorker::plain().await, FakeWorker::plain().await];
    let router = router(config(), &[&workers[0], &workers[1]]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let id = router.workers()[1].id;
    let shown = client.get(&format!("/workers/{id}")).await;
    assert_eq!((shown.status, &shown.json()["url"]), (StatusCode::OK, &json!(workers[1].url())));
    let path = format!("/workers/{id}");
    let removed = client.call(request(Method::DELETE, &path, "")).await.expect("an answer");
    assert_eq!(removed.json()["removed"], workers[1].url());
    for gone in [path.as_str(), "/workers/x", "/workers/-1", "/workers/99999999999999999999"] {
        let answer = client.get(gone).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{gone}");
        assert_eq!(answer.error_code(), "worker_unknown");
    }
    assert_eq!(router.workers().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_are_the_reserved_load() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let guard = router.router().registry.replicas()[0].reserve(128, Reason::Cold);
    let mut client = Client::connect(router.local_addr()).await;
    let expected = |load, tokens| {
        json!({"workers": [
            {"worker": worker.url(), "load": load, "pending_tokens": tokens, "healthy": true},
        ]})
    };
    assert_eq!(client.get("/get_loads").await.json(), expected(1, 128));
    drop(guard);
    assert_eq!(client.get("/get_loads").await.json(), expected(0, 0));
}

/// Every malformed body gets an error in the usual shape.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admin_routes_handle_any_body() {
    let router = router(config(), &[]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let good = r#"{"url": "http://127.0.0.1:1"}"#;
    let mut bodies: Vec<Vec<u8>> = [
        "",
        "{",
        "null",
        "[]",
        "1e999",
        "\"x\"",
        "{}",
        r#"{"url": null}"#,
        r#"{"url": 7}"#,
        r#"{"url": []}"#,
        r#"{"url": ""}"#,
        r#"{"url": "ftp://x"}"#,
        r#"{"url": "http://\u0000"}"#,
        r#"{"url": "http://127.0.0.1:1", "url": "http://127.0.0.1:2"}"#,
        "\u{feff}{}",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into();
    bodies.push(vec![0xff; 100]);
    bodies.push("[".repeat(100_000).into_bytes());
    bodies.push(format!("{{\"url\": \"http://{}\"}}", "a".repeat(100_000)).into_bytes());
    // Every prefix of a good body, and every body with one wrong byte.
    bodies.extend((0..good.len()).map(|end| good.as_bytes()[..end].to_vec()));
    bodies.extend((0..good.len()).map(|at| {
        let mut bytes = good.as_bytes().to_vec();
        bytes[at] = 0x01;
        bytes
    }));
    for body in bodies {
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        let answer = client.post("/workers", body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{shown}");
        answer.error_code();
    }
    let huge = client.post("/workers", vec![b' '; (1 << 20) + 1]).await;
    assert_eq!(
        (huge.status, huge.error_code()),
        (StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large".to_owned())
    );
    let mut client = Client::connect(router.local_addr()).await;
    for query in
        ["", "?", "?url", "?url=", "?url=%", "?url=%00", "?url=http://a&url=http://b", "?x=1"]
    {
        for path in ["/add_worker", "/remove_worker"] {
            let answer = client.post(&format!("{path}{query}"), "").await;
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{path}{query}");
            answer.error_code();
        }
    }
    assert!(router.workers().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_is_found_by_url_and_by_id() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let encoded = worker.url().replace(':', "%3A").replace('/', "%2F");
    for id in ["0", &encoded] {
        let shown = client.get(&format!("/workers/{id}")).await;
        assert_eq!(shown.status, StatusCode::OK, "{id}");
        assert_eq!(shown.json()["url"], worker.url());
        assert_eq!(shown.json()["is_healthy"], true);
    }
    let removal = request(Method::DELETE, &format!("/workers/{encoded}"), "");
    let removed = client.call(removal).await.expect("an answer");
    assert_eq!(
        (removed.status, &removed.json()["status"]),
        (StatusCode::ACCEPTED, &"accepted".into())
    );
    let again = client.get(&format!("/workers/{encoded}")).await;
    assert_eq!(
        (again.status, again.error_code().as_str()),
        (StatusCode::NOT_FOUND, "worker_unknown")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_a_worker_are_refused_at_once() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for (path, status) in [("/health", 200), ("/health_generate", 200), ("/v1/models", 200)] {
        assert_eq!(client.get(path).await.status, status, "{path}");
    }
    router.remove_worker(&worker.url()).expect("there");
    // The default time in the queue is a minute; these requests do not wait in it.
    for path in ["/health", "/health_generate", "/v1/models", "/get_model_info"] {
        let answer = client.get(path).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{path}");
        assert_eq!(answer.error_code(), "no_healthy_worker");
        assert_eq!(router.router().queue.waiting(), 0);
    }
    assert_eq!(client.get("/liveness").await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn root_redirects_to_the_dashboard_and_openapi_lists_the_routes() {
    const DOCUMENT: &str = r#"{"openapi":"3.1.0","info":{},"paths":{"/generate":{"post":{"summary":"g"}},
        "/worker_only":{"get":{}},"/v1/chat/completions":{"post":{}},"/health":{"get":{}}}}"#;
    let worker = FakeWorker::start(|seen| match seen.head.uri.path() {
        "/openapi.json" => Reply::ok(DOCUMENT),
        _ => Reply::ok("{}"),
    })
    .await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let mut browsing = request(Method::GET, "/", "");
    browsing.headers_mut().insert("accept", "text/html,*/*".parse().expect("a value"));
    let led = client.call(browsing).await.expect("an answer");
    assert_eq!(
        (led.status.as_u16(), &led.headers["location"]),
        (307, &"/dashboard".parse().expect("a value"))
    );
    assert_eq!(client.get("/").await.status, StatusCode::NOT_FOUND);
    for file in ["/docs", "/docs/page.js", "/docs/page.css"] {
        assert_eq!(client.get(file).await.status, StatusCode::OK, "{file}");
    }
    let document = client.get("/openapi.json").await.json();
    let paths = document["paths"].as_object().expect("paths");
    assert_eq!(paths["/generate"]["post"]["summary"], "g");
    assert!(!paths.contains_key("/worker_only"), "the router does not pass that on");
    let parameters = &paths["/workers/{id}"]["delete"]["parameters"];
    assert_eq!((&parameters[0]["name"], &parameters[0]["in"]), (&"id".into(), &"path".into()));
    for (path, methods) in paths {
        for method in methods.as_object().expect("methods").keys().filter(|it| *it != "delete") {
            let path = path.replace("{id}", "0").replace("{model}", "m");
            if path == "/" || path == "/dashboard/events" {
                continue;
            }
            let method = method.to_uppercase().parse().expect("a method");
            let answer = client.call(request(method, &path, "{}")).await.expect("an answer");
            let unknown = answer.status == 404 && answer.error_code() == "unknown_path";
            assert!(!unknown && answer.status != 405, "{path}: {}", answer.status);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sglang_server_routes_are_answered_for_all_workers() {
    let fake = || {
        FakeWorker::start(|seen| match seen.head.uri.path() {
            "/get_load" => Reply::ok(r#"[{"dp_rank":0,"num_reqs":3}]"#),
            _ => Reply::ok("{}"),
        })
    };
    let (first, second) = (fake().await, fake().await);
    first.set_info(r#"{"max_total_num_tokens":4096,"version":"1","internal_states":[{"load":1}]}"#);
    let router = router(config(), &[&first, &second]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let loads = client.get("/get_load").await.json();
    assert_eq!(loads[1], json!({ "dp_rank": 1, "num_reqs": 3, "worker": second.url() }));
    for path in ["/get_server_info", "/server_info"] {
        let info = client.get(path).await.json();
        assert_eq!((&info["max_total_num_tokens"], &info["version"]), (&4096.into(), &"1".into()));
        assert_eq!(info["workers"].as_array().map(Vec::len), Some(2), "{path}");
        assert!(info["router"]["policy"].is_string(), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_loads_of_another_shape_does_not_hide_the_others() {
    let good = FakeWorker::start(|_| Reply::ok(r#"[{"num_reqs":3}]"#)).await;
    for body in ["[1]", "[[]]", "{}", "3", "null", "[null]", "<html>"] {
        let strange = FakeWorker::start(move |_| Reply::ok(body)).await;
        let router = router(config(), &[&strange, &good]).await;
        let loads = Client::connect(router.local_addr()).await.get("/get_load").await.json();
        assert_eq!(loads, json!([{ "dp_rank": 0, "num_reqs": 3, "worker": good.url() }]), "{body}");
    }
}
