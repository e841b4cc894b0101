//! `/dashboard` as plain HTTP. That the page works in a browser is `make test-dashboard`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::{Method, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;

use hyper::body::Incoming;
use mla_router::{Config, RouterHandle, admin::dashboard::FILES, fleet::Phase};

use crate::support::{Client, FakeWorker, Reply, all_in, config, request, router, secs, soon};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_is_public_and_its_data_needs_the_key() {
    let key = "sesame".parse().expect("a key");
    let router = router(Config { api_key: vec![key], ..config() }, &[]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for file in FILES {
        let answer = client.get(file.path).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", file.path);
        assert_eq!(answer.headers["content-type"], file.content_type);
        assert_eq!(answer.headers["x-content-type-options"], "nosniff");
        let policy = answer.headers["content-security-policy"].to_str().expect("text");
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
    }
    assert_eq!(client.get("/dashboard/events").await.status, StatusCode::UNAUTHORIZED);
}

/// The content security policy would block inline scripts, so the pages must have none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_has_no_inline_and_no_external_content() {
    let router = router(config(), &[]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for file in FILES {
        let path = file.path;
        let body = client.get(path).await.body;
        let text = String::from_utf8(body.to_vec()).expect("text");
        let bad =
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="];
        for word in bad.into_iter().chain(["onclick", "onload", "<style", "url(", "https://"]) {
            assert!(!text.contains(word), "{word} in {path}");
        }
    }
}

/// The events of the page, one by one.
struct Events {
    body: Incoming,
    /// The connection lives as long as its client.
    _client: Client,
}

impl Events {
    async fn open(router: &RouterHandle) -> Self {
        let mut client = Client::connect(router.local_addr()).await;
        let answer = client.send(request(Method::GET, "/dashboard/events", "")).await;
        let answer = answer.expect("events");
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        Self { body: answer.into_body(), _client: client }
    }

    async fn next(&mut self) -> Option<Value> {
        let frame = soon(self.body.frame()).await?.expect("whole");
        let bytes = frame.into_data().expect("data");
        let event = bytes.strip_prefix(b"data: ").expect("an event");
        Some(serde_json::from_slice(event).expect("JSON"))
    }

    async fn until(&mut self, holds: impl Fn(&Value) -> bool) -> Value {
        loop {
            let event = self.next().await.expect("more events");
            if holds(&event) {
                return event;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_contain_the_statistics() {
    let workers = [FakeWorker::plain().await, FakeWorker::plain().await];
    let router = router(config(), &[&workers[0], &workers[1]]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..3 {
        client.post("/v1/chat/completions", r#"{"messages":[]}"#).await;
    }
    let mut events = Events::open(&router).await;
    for _ in 0..2 {
        let stats = events.next().await.expect("an event")["stats"].take();
        assert_eq!(stats["requests"]["answered"]["2xx"], 3);
        assert_eq!(stats["first_byte"]["count"], 3);
        assert_eq!(stats["workers"].as_array().expect("a list").len(), 2);
        assert_eq!(stats["workers"][1]["url"], workers[1].url());
        assert_eq!(stats["workers"][1]["phase"], "healthy");
        assert_eq!(stats["workers"][1]["trouble"], Value::Null);
    }
    // A reader does not hold the router up.
    assert!(soon(router.drain(Duration::from_secs(60))).await);
    while events.next().await.is_some() {}
}

/// Returns the number of samples in an event, and the number of its last sample.
fn samples(event: &Value) -> (usize, u64) {
    let fine = event["history"]["total"]["fine"].as_array().expect("a list");
    (fine.len(), event["history"]["tick"].as_u64().expect("a number"))
}

/// A page that is opened or reloaded shows the earlier samples.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_event_has_the_history_and_later_ones_the_new_samples() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    Events::open(&router).await.until(|event| samples(event).1 >= 2).await;
    for _ in 0..2 {
        let mut events = Events::open(&router).await;
        let (length, mut last) = samples(&events.next().await.expect("an event"));
        assert_eq!(length as u64, last, "all there is");
        while last < 4 {
            let (length, tick) = samples(&events.next().await.expect("an event"));
            assert_eq!(length as u64, tick - last);
            last = tick;
        }
    }
}

/// A value of the latest sample of the only worker; null without a sample.
fn latest(event: &Value, figure: &str) -> Value {
    let figures = event["history"]["figures"].as_array().expect("names");
    let at = figures.iter().position(|name| name == figure).expect("a figure");
    // The first sample may be older than the worker.
    let fine = event["history"]["workers"]["0"]["fine"].as_array();
    fine.and_then(|fine| fine.last()).map_or(Value::Null, |sample| sample[at].clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_load_is_shown() {
    let worker = FakeWorker::plain().await;
    worker.set_metrics(
        "sglang:num_running_reqs{model_name=\"m\"} 3\nsglang:num_queue_reqs 2\n\
         sglang:token_usage 0.25\nsglang:generation_tokens_total 1000\n",
    );
    let router = router(config(), &[&worker]).await;
    let mut events = Events::open(&router).await;
    let told = |event: &Value| event["stats"]["workers"][0]["engine"]["running"] == 3.0;
    let event = events.until(told).await;
    assert_eq!(event["stats"]["workers"][0]["engine"]["kv_usage"], 0.25);
    let event = events.until(|event| latest(event, "output_tokens") == 0.0).await;
    assert_eq!(latest(&event, "running"), 3.0);
    assert_eq!(latest(&event, "waiting"), 2.0);
    assert_eq!(latest(&event, "kv_usage"), 0.25);
    assert_eq!(latest(&event, "pause"), Value::Null, "it does not say");
    worker.set_metrics("sglang:generation_tokens_total 1100\n");
    events.until(|event| latest(event, "output_tokens").as_f64().is_some_and(|n| n > 0.0)).await;
}

/// Until its next restart it is not asked every second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_without_load_figures_is_shown() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut events = Events::open(&router).await;
    let event = events.until(|event| latest(event, "requests") == 0.0).await;
    assert_eq!(event["stats"]["workers"][0]["engine"]["running"], Value::Null);
    assert_eq!(latest(&event, "kv_usage"), Value::Null);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unhealthy_worker_has_a_reason_and_a_time() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    worker.kill().await;
    all_in(Phase::Down, &router).await;
    let trouble = router.workers()[0].trouble.clone().expect("a reason");
    assert!(trouble.reason.contains("Connection refused"), "{trouble:?}");
    let mut client = Client::connect(router.local_addr()).await;
    let workers = client.get("/workers").await.json();
    assert!(workers["workers"][0]["trouble"]["for_s"].as_f64().expect("a time") >= trouble.for_s);
    worker.restart().await;
    all_in(Phase::Healthy, &router).await;
    assert_eq!(router.workers()[0].trouble, None);
    worker.set_healthy(false);
    all_in(Phase::Down, &router).await;
    let trouble = router.workers()[0].trouble.clone().expect("a reason");
    assert!(trouble.reason.contains("503"), "{trouble:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withheld_worker_has_a_reason_before_and_after_a_failure() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let url = worker.url().parse().expect("a URL");
    let reason = |router: &RouterHandle| router.workers()[0].trouble.clone().map(|is| is.reason);
    let not_ready = Some("its discovery source reports it as not ready".to_owned());
    router.router().withhold(&url, true);
    assert_eq!(reason(&router), not_ready);
    worker.kill().await;
    all_in(Phase::Down, &router).await;
    assert_ne!(reason(&router), not_ready);
    worker.restart().await;
    all_in(Phase::Healthy, &router).await;
    assert_eq!(reason(&router), not_ready);
    router.router().withhold(&url, false);
    assert_eq!(reason(&router), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_breaker_has_a_reason_until_the_next_success() {
    let fails = Arc::new(AtomicBool::new(true));
    let failing = Arc::clone(&fails);
    let worker = FakeWorker::start(move |_| {
        if failing.load(Ordering::SeqCst) { Reply::status(500) } else { Reply::good() }
    })
    .await;
    let config = Config {
        cb_failure_threshold: 2,
        cb_timeout_duration_secs: secs(0.05),
        max_retries: 0,
        ..config()
    };
    let router = router(config, &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for expected in [None, Some("it keeps failing; the circuit breaker is open for 50ms")] {
        client.post("/v1/completions", r#"{"prompt":"x"}"#).await;
        let trouble = router.workers()[0].trouble.clone();
        assert_eq!(trouble.map(|trouble| trouble.reason).as_deref(), expected);
    }
    fails.store(false, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(60)).await;
    client.post("/v1/completions", r#"{"prompt":"x"}"#).await;
    assert_eq!(router.workers()[0].trouble, None);
}
