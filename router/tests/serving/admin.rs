//! The routes that the router answers itself.

use http::{Method, StatusCode};
use mla_router::{Config, fleet::worker::Phase};
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
async fn metrics_are_well_formed_and_count() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..3 {
        client.post("/v1/chat/completions", r#"{"messages":[]}"#).await;
    }
    client.get("/nothing").await;
    let answer = client.get("/metrics").await;
    assert_eq!(answer.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let text = String::from_utf8(answer.body.to_vec()).expect("text");
    let url = worker.url();
    for line in [
        r#"mla_router_requests_total{endpoint="chat_completions",status="2xx"} 3"#.to_owned(),
        r#"mla_router_requests_total{endpoint="router",status="4xx"} 1"#.to_owned(),
        "mla_router_first_byte_seconds_count 3".to_owned(),
        "mla_router_overhead_seconds_count 3".to_owned(),
        format!(r#"mla_router_selections_total{{worker="{url}",reason="no_prefix"}} 3"#),
        format!(r#"mla_router_worker_healthy{{worker="{url}"}} 1"#),
        format!(r#"mla_router_worker_requests{{worker="{url}"}} 0"#),
        r#"mla_router_upstream_connections_total{state="reused"} 2"#.to_owned(),
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\nis not in\n{text}");
    }
    lint(&text);
}

/// What `promtool check metrics` demands.
fn lint(text: &str) {
    let mut family = String::new();
    let mut kind = String::new();
    let mut series = std::collections::HashSet::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("a help text");
            assert!(help.ends_with('.'), "{line}");
            name.clone_into(&mut family);
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, of) = rest.split_once(' ').expect("a type");
            assert_eq!(name, family, "TYPE follows its HELP");
            of.clone_into(&mut kind);
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
        } else {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            assert!(series.insert(name.to_owned()), "twice: {line}");
            value.parse::<f64>().expect("a number");
            let bare = name.split('{').next().expect("a name");
            let suffix = bare.strip_prefix(&family).expect("a series of its family");
            let histogram = ["_bucket", "_sum", "_count"].contains(&suffix);
            assert!(if kind == "histogram" { histogram } else { suffix.is_empty() }, "{line}");
        }
    }
}
