//! Every wait is bounded: for the head of a client, and for a worker.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body_util::BodyExt;
use mla_router::{
    Config,
    config::PolicyName,
    fleet::{BreakerState, Phase},
};
use tokio::{sync::mpsc, task::JoinSet, time::Instant};

use crate::support::{
    Client, Event, FakeWorker, Raw, Reply, assert_nothing_reserved, config, post, router, secs,
    soon,
};

/// The paused clock advances to the next timer when all tasks are idle.
#[tokio::test(start_paused = true)]
async fn idle_client_connection_is_kept_for_a_minute() {
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..3 {
        assert_eq!(client.get("/liveness").await.status, StatusCode::OK);
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn idle_client_connection_is_closed() {
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[]).await;
    for message in ["", "GET /health HTTP/1.1\r\nhost: x\r\n\r\n"] {
        let begun = Instant::now();
        let answer = Raw::send(router.local_addr(), message.as_bytes()).await.read_to_close().await;
        assert_eq!(answer.is_empty(), message.is_empty(), "{answer}");
        let waited = begun.elapsed().as_secs();
        assert!((75..80).contains(&waited), "{waited} s");
    }
}

#[tokio::test(start_paused = true)]
async fn silent_worker_is_a_504_and_its_connection_is_closed() {
    let mut worker = FakeWorker::start(|_| Reply::Hang).await;
    let config = Config { request_timeout_secs: secs(0.05), ..config() };
    let router = router(config, &[&worker]).await;
    let answer = Client::connect(router.local_addr()).await.post("/generate", "{}").await;
    assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(answer.error_code(), "timeout");
    worker.request().await;
    assert!(matches!(worker.event().await, Event::Aborted));
    assert_eq!(router.workers()[0].phase, Phase::Healthy, "slow is not dead");
    assert_nothing_reserved(&router).await;
}

#[tokio::test(start_paused = true)]
async fn stream_over_the_time_limit_is_cut() {
    let (frames, source) = mpsc::unbounded_channel();
    let source = parking_lot::Mutex::new(Some(source));
    let mut worker =
        FakeWorker::start(move |_| Reply::Frames(source.lock().take().expect("one request"))).await;
    let config = Config { request_timeout_secs: secs(0.2), ..config() };
    let router = router(config, &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    frames.send(Bytes::from_static(b"data: {\"choices\":[1]}\n\n")).expect("streaming");
    let mut response = client.send(post("/generate", "{}")).await.expect("a head");
    response.frame().await.expect("not over").expect("not broken");
    assert!(matches!(response.frame().await, Some(Err(_))), "the stream must not look whole");
    worker.request().await;
    assert!(matches!(worker.event().await, Event::Aborted));
    assert_nothing_reserved(&router).await;
}

const STREAM: &str = r#"{"prompt":"x","stream":true}"#;

fn hasty() -> Config {
    Config {
        policy: PolicyName::RoundRobin,
        first_token_timeout_secs: secs(0.05),
        health_check_interval_secs: secs(3600.0),
        ..config()
    }
}

#[tokio::test(start_paused = true)]
async fn stream_without_first_byte_is_retried_elsewhere() {
    let mut stuck = FakeWorker::start(|_| Reply::Hang).await;
    let good = FakeWorker::start(|_| Reply::ok("data: {\"choices\":[1]}\n\n")).await;
    let router = router(hasty(), &[&stuck, &good]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let answer = client.post("/v1/completions", STREAM).await;
    assert_eq!(
        (answer.status, &answer.body[..]),
        (StatusCode::OK, &b"data: {\"choices\":[1]}\n\n"[..])
    );
    stuck.request().await;
    assert!(matches!(stuck.event().await, Event::Aborted), "it is not left with the request");
    assert_nothing_reserved(&router).await;
}

/// A head without an event is no start of a stream.
#[tokio::test(start_paused = true)]
async fn head_or_partial_event_does_not_stop_the_first_token_timer() {
    for begun in ["", "data: 1\n"] {
        let (silent, source) = mpsc::unbounded_channel();
        if !begun.is_empty() {
            silent.send(Bytes::from_static(begun.as_bytes())).expect("streaming");
        }
        let source = parking_lot::Mutex::new(Some(source));
        let mut stuck =
            FakeWorker::start(move |_| Reply::Frames(source.lock().take().expect("one request")))
                .await;
        let good = FakeWorker::start(|_| Reply::ok("data: {\"choices\":[2]}\n\n")).await;
        let router = router(hasty(), &[&stuck, &good]).await;
        let mut client = Client::connect(router.local_addr()).await;
        let answer = client.post("/v1/completions", STREAM).await;
        assert_eq!(
            (answer.status, &answer.body[..]),
            (StatusCode::OK, &b"data: {\"choices\":[2]}\n\n"[..])
        );
        stuck.request().await;
        assert!(matches!(stuck.event().await, Event::Aborted));
        drop(silent);
    }
}

/// Without another worker, waiting is better than an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_first_byte_is_used_if_no_other_worker_is_left() {
    let (frames, source) = mpsc::unbounded_channel();
    let source = parking_lot::Mutex::new(Some(source));
    let mut worker =
        FakeWorker::start(move |_| Reply::Frames(source.lock().take().expect("one request"))).await;
    let config = Config { cb_failure_threshold: 1, ..hasty() };
    let router = router(config, &[&worker]).await;
    let address = router.local_addr();
    let waiting = tokio::spawn(async move {
        Client::connect(address).await.post("/v1/completions", STREAM).await
    });
    worker.request().await;
    // The breaker learns of the late byte before the deadline.
    while router.workers()[0].breaker == BreakerState::Closed {
        tokio::task::yield_now().await;
    }
    frames.send(Bytes::from_static(b"data: {\"choices\":[1]}\n\n")).expect("streaming");
    drop(frames);
    assert_eq!(waiting.await.expect("no panic").status, StatusCode::OK);
    assert_nothing_reserved(&router).await;
}

/// The time of an answer in one piece says nothing about its worker.
#[tokio::test(start_paused = true)]
async fn non_streamed_answer_has_no_first_token_deadline() {
    let mut slow = FakeWorker::start(|_| Reply::Hang).await;
    let mut other = FakeWorker::plain().await;
    let config = Config { request_timeout_secs: secs(0.3), ..hasty() };
    let router = router(config, &[&slow, &other]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let answer = client.post("/v1/completions", r#"{"prompt":"x"}"#).await;
    assert_eq!(answer.error_code(), "timeout");
    assert_eq!((slow.requests_so_far(), other.requests_so_far()), (1, 0));
}

/// Requests that wait for a first byte leave a worker that is found dead or frozen.
#[tokio::test(start_paused = true)]
async fn prefill_waiters_of_a_frozen_worker_go_elsewhere() {
    let mut frozen = FakeWorker::start(|_| Reply::Hang).await;
    let good = FakeWorker::plain().await;
    let config =
        Config { policy: PolicyName::RoundRobin, health_check_timeout_secs: secs(0.1), ..config() };
    let router = router(config, &[&frozen, &good]).await;
    let address = router.local_addr();
    let waiting = tokio::spawn(async move {
        Client::connect(address).await.post("/v1/completions", r#"{"prompt":"x"}"#).await
    });
    frozen.request().await;
    frozen.freeze();
    assert_eq!(waiting.await.expect("no panic").status, StatusCode::OK);
    assert!(matches!(frozen.event().await, Event::Aborted));
    assert_nothing_reserved(&router).await;
}

/// One late request triggers a health check, and its result applies to all requests.
#[tokio::test(start_paused = true)]
async fn first_late_request_releases_all_waiters_of_a_frozen_worker() {
    let mut frozen = FakeWorker::start(|_| Reply::Hang).await;
    let good = FakeWorker::start(|seen| {
        Reply::ok(if seen.body == STREAM.as_bytes() {
            "data: {\"choices\":[1]}\n\n"
        } else {
            r#"{"choices":[]}"#
        })
    })
    .await;
    let config = Config { health_check_timeout_secs: secs(0.1), ..hasty() };
    let router = router(config, &[&frozen, &good]).await;
    let address = router.local_addr();
    let mut waiting = JoinSet::new();
    let mut ask = |body| {
        waiting.spawn(
            async move { Client::connect(address).await.post("/v1/completions", body).await },
        );
    };
    // Round robin: every second request goes to the frozen worker. Answers in one piece have no such limit.
    for _ in 0..6 {
        ask(r#"{"prompt":"x"}"#);
    }
    for _ in 0..3 {
        frozen.request().await;
    }
    frozen.freeze();
    for _ in 0..2 {
        ask(STREAM);
    }
    while let Some(answer) = soon(waiting.join_next()).await {
        assert_eq!(answer.expect("no panic").status, StatusCode::OK);
    }
    assert_nothing_reserved(&router).await;
}
