//! The routes that the router answers itself.

use http::{Method, StatusCode};
use mla_router::{Config, fleet::worker::Phase, policy::Reason};
use serde_json::{Value, json};

use crate::support::{Client, FakeWorker, Reply, all_in, config, request, router, secs};

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
async fn an_abort_goes_to_every_worker_and_one_yes_is_enough() {
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
async fn profiles_are_of_all_workers_and_one_refusal_is_told() {
    let mut able = FakeWorker::plain().await;
    let mut unable = FakeWorker::start(|_| Reply::status(404)).await;
    let router = router(config(), &[&able, &unable]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for path in ["/start_profile", "/stop_profile"] {
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
async fn a_flush_that_one_worker_misses_is_not_a_success() {
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
async fn server_info_gathers_the_states_of_all_workers() {
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
async fn a_worker_has_a_path_of_its_own() {
    let workers = [FakeWorker::plain().await, FakeWorker::plain().await];
    let router = router(config(), &[&workers[0], &workers[1]]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let id = router.workers()[1].id;
    let shown = client.get(&format!("/workers/{id}")).await;
    assert_eq!((shown.status, &shown.json()["url"]), (StatusCode::OK, &json!(workers[1].url())));
    let path = format!("/workers/{id}");
    let removed = client.call(request(Method::DELETE, &path, "")).await.expect("an answer");
    assert_eq!(removed.json(), json!({"removed": workers[1].url()}));
    for gone in [path.as_str(), "/workers/x", "/workers/-1", "/workers/99999999999999999999"] {
        let answer = client.get(gone).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{gone}");
        assert_eq!(answer.error_code(), "worker_unknown");
    }
    assert_eq!(router.workers().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_are_what_is_booked() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let booking = router.router().registry.workers()[0].book(128, Reason::Cold);
    let mut client = Client::connect(router.local_addr()).await;
    let expected = |load, tokens| {
        json!({"workers": [
            {"worker": worker.url(), "load": load, "pending_tokens": tokens, "healthy": true},
        ]})
    };
    assert_eq!(client.get("/get_loads").await.json(), expected(1, 128));
    drop(booking);
    assert_eq!(client.get("/get_loads").await.json(), expected(0, 0));
}

/// Whatever a body holds, it is the sender's mistake and said so in the usual shape.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_body_breaks_the_admin_routes() {
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
    // Every prefix of a good one, and every one with a byte spoiled.
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
