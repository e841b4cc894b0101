//! Engines that stop behind a live HTTP server: their waiting requests move to other workers. Slow engines keep
//! their requests. The paused clock advances to the next timer when all tasks are idle.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::StatusCode;
use mla_router::{Config, config::PolicyName};
use tokio::{
    sync::{Semaphore, mpsc},
    time::{Instant, sleep},
};

use crate::support::{
    Canary, Client, Event, FakeWorker, GOOD, Reply, assert_nothing_reserved, config, router, secs,
};

const PATH: &str = "/v1/completions";
const WHOLE: &str = r#"{"prompt":"x"}"#;
const STREAMED: &str = r#"{"prompt":"x","stream":true}"#;

const EVENT: &str = "data: {\"choices\":[]}\n\n";

/// A complete stream.
const ANSWER: &str = "data: {\"choices\":[]}\n\ndata: [DONE]\n\n";

const STUCK: &str = r#"{"status":"stuck","last_step_age":1.1}"#;
const WELL: &str = r#"{"status":"ok","last_step_age":0.1}"#;

/// The default settings of users.
fn in_turn() -> Config {
    let allowed_hosts = config().allowed_hosts;
    Config { policy: PolicyName::RoundRobin, allowed_hosts, ..Config::default() }
}

#[tokio::test(start_paused = true)]
async fn request_of_a_stuck_engine_is_retried_elsewhere() {
    for body in [WHOLE, STREAMED] {
        let mut stuck = FakeWorker::start(|_| Reply::Hang).await;
        let good = FakeWorker::start(|seen| {
            Reply::ok(if seen.body == STREAMED.as_bytes() { EVENT } else { GOOD })
        })
        .await;
        let router = router(in_turn(), &[&stuck, &good]).await;
        let address = router.local_addr();
        let asked =
            tokio::spawn(
                async move { Client::connect(address).await.post(PATH, body).await.status },
            );
        stuck.request().await;
        stuck.report(503, STUCK);
        let begun = Instant::now();
        assert_eq!(asked.await.expect("no panic"), StatusCode::OK);
        assert!(begun.elapsed() <= Duration::from_secs(2), "{:?}", begun.elapsed());
        assert!(matches!(stuck.event().await, Event::Aborted));
        assert_nothing_reserved(&router).await;
    }
}

/// An engine like SGLang: `/health_generate` generates a token.
#[tokio::test(start_paused = true)]
async fn failed_canary_moves_requests_within_four_seconds() {
    for body in [WHOLE, STREAMED] {
        let mut frozen = FakeWorker::start(|_| Reply::Hang).await;
        let good = FakeWorker::start(|seen| {
            Reply::ok(if seen.body == STREAMED.as_bytes() { ANSWER } else { GOOD })
        })
        .await;
        frozen.set_canary(Canary::Sings);
        let router = router(in_turn(), &[&frozen, &good]).await;
        let address = router.local_addr();
        // The first canary was answered.
        sleep(Duration::from_secs(2)).await;
        frozen.set_canary(Canary::Silent);
        let begun = Instant::now();
        assert_eq!(Client::connect(address).await.post(PATH, body).await.status, StatusCode::OK);
        assert!(begun.elapsed() <= Duration::from_secs(4), "{:?}", begun.elapsed());
        frozen.request().await;
        assert!(matches!(frozen.event().await, Event::Aborted));
        // Its health checks are good, and no further canary is due.
        sleep(Duration::from_secs(2)).await;
        for _ in 0..4 {
            let answer = Client::connect(address).await.post(PATH, body).await;
            assert_eq!(answer.status, StatusCode::OK);
        }
        assert_eq!(frozen.requests_so_far(), 0);
        // A later byte is a sign of life.
        frozen.set_canary(Canary::Sings);
        assert_nothing_reserved(&router).await;
    }
}

#[tokio::test(start_paused = true)]
async fn slow_engine_with_answered_canary_keeps_its_requests() {
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let mut slow = FakeWorker::start(move |_| Reply::When(Arc::clone(&held))).await;
    let mut other = FakeWorker::plain().await;
    slow.set_canary(Canary::Sings);
    let router = router(in_turn(), &[&slow, &other]).await;
    let address = router.local_addr();
    let asked = tokio::spawn(async move { Client::connect(address).await.post(PATH, WHOLE).await });
    slow.request().await;
    sleep(Duration::from_secs(900)).await;
    gate.add_permits(1);
    assert_eq!(asked.await.expect("no panic").status, StatusCode::OK);
    assert_eq!(other.requests_so_far(), 0);
}

/// An engine like vLLM: its token counts increase with each step.
#[tokio::test(start_paused = true)]
async fn stopped_counters_are_detected_by_their_previous_rate() {
    let mut frozen = FakeWorker::start(|_| Reply::Hang).await;
    let good = FakeWorker::plain().await;
    let router = router(in_turn(), &[&frozen, &good]).await;
    let address = router.local_addr();
    let asked = tokio::spawn(async move { Client::connect(address).await.post(PATH, WHOLE).await });
    frozen.request().await;
    // A long answer in one piece.
    for tokens in 0..600 {
        frozen.set_metrics(&format!("vllm:generation_tokens_total {tokens}\n"));
        sleep(Duration::from_millis(250)).await;
        assert!(!asked.is_finished(), "after {tokens} tokens");
    }
    let begun = Instant::now();
    assert_eq!(asked.await.expect("no panic").status, StatusCode::OK);
    // Four times the four seconds after which its counts first increased.
    assert!(begun.elapsed() <= Duration::from_secs(17), "{:?}", begun.elapsed());
    assert!(matches!(frozen.event().await, Event::Aborted));
}

#[tokio::test(start_paused = true)]
async fn stream_of_a_frozen_engine_ends_with_an_error_despite_good_health() {
    let (frames, source) = mpsc::unbounded_channel();
    frames.send(Bytes::from_static(EVENT.as_bytes())).expect("streaming");
    let source = parking_lot::Mutex::new(Some(source));
    let frozen =
        FakeWorker::start(move |_| Reply::Events(source.lock().take().expect("one request"))).await;
    let good = FakeWorker::plain().await;
    frozen.set_canary(Canary::Sings);
    let router = router(in_turn(), &[&frozen, &good]).await;
    let address = router.local_addr();
    sleep(Duration::from_secs(2)).await;
    frozen.set_canary(Canary::Silent);
    let begun = Instant::now();
    let answer = Client::connect(address).await.post(PATH, STREAMED).await;
    let text = std::str::from_utf8(&answer.body).expect("text");
    assert!(text.contains("stream_stuck") && !text.contains("[DONE]"), "{text}");
    assert!(begun.elapsed() <= Duration::from_secs(7), "{:?}", begun.elapsed());
    drop(frames);
}

/// An engine without canary and counts: only its silence counts.
#[tokio::test(start_paused = true)]
async fn silent_engine_loses_its_requests_after_a_minute() {
    let mut silent = FakeWorker::start(|_| Reply::Hang).await;
    let good = FakeWorker::plain().await;
    let router = router(in_turn(), &[&silent, &good]).await;
    let address = router.local_addr();
    let begun = Instant::now();
    assert_eq!(Client::connect(address).await.post(PATH, WHOLE).await.status, StatusCode::OK);
    assert!((60..=62).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    silent.request().await;
    assert!(matches!(silent.event().await, Event::Aborted));
    // It gets no further requests for now.
    for _ in 0..4 {
        assert_eq!(Client::connect(address).await.post(PATH, WHOLE).await.status, StatusCode::OK);
    }
    assert_eq!(silent.requests_so_far(), 0);
}

#[tokio::test(start_paused = true)]
async fn long_prompt_stays_on_a_worker_with_progress() {
    let (frames, source) = mpsc::unbounded_channel();
    let source = parking_lot::Mutex::new(Some(source));
    let mut slow =
        FakeWorker::start(move |_| Reply::Frames(source.lock().take().expect("one request"))).await;
    let mut other = FakeWorker::start(|_| Reply::ok(EVENT)).await;
    for worker in [&slow, &other] {
        worker.report(200, WELL);
    }
    let router = router(in_turn(), &[&slow, &other]).await;
    let address = router.local_addr();
    let asked =
        tokio::spawn(async move { Client::connect(address).await.post(PATH, STREAMED).await });
    slow.request().await;
    sleep(Duration::from_secs(900)).await;
    frames.send(Bytes::from_static(EVENT.as_bytes())).expect("it is still waited for");
    drop(frames);
    assert_eq!(asked.await.expect("no panic").body, EVENT);
    assert_eq!(other.requests_so_far(), 0);
}

#[tokio::test(start_paused = true)]
async fn freezing_request_is_sent_to_at_most_two_workers() {
    let mut workers = Vec::new();
    for _ in 0..4 {
        workers.push(FakeWorker::start(|_| Reply::Hang).await);
    }
    let router = router(in_turn(), &workers.iter().collect::<Vec<_>>()).await;
    let address = router.local_addr();
    let asked = tokio::spawn(async move { Client::connect(address).await.post(PATH, WHOLE).await });
    let mut frozen = 0;
    while !asked.is_finished() {
        for worker in &mut workers {
            if worker.requests_so_far() > 0 {
                worker.report(503, STUCK);
                frozen += 1;
            }
        }
        sleep(Duration::from_millis(10)).await;
    }
    let answer = asked.await.expect("no panic");
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(answer.error_code(), "request_kills_workers");
    assert_eq!(answer.headers["x-should-retry"], "false");
    assert_eq!(frozen, 2);
}

/// A second move for lateness would only repeat the work of the first one.
#[tokio::test(start_paused = true)]
async fn late_request_is_moved_once() {
    let mut workers = Vec::new();
    for _ in 0..4 {
        workers.push(FakeWorker::start(|_| Reply::Hang).await);
    }
    let config = Config {
        policy: PolicyName::RoundRobin,
        first_token_timeout_secs: secs(0.1),
        request_timeout_secs: secs(60.0),
        ..config()
    };
    let router = router(config, &workers.iter().collect::<Vec<_>>()).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, STREAMED).await;
    assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT);
    let asked: usize = workers.iter_mut().map(FakeWorker::requests_so_far).sum();
    assert_eq!(asked, 2);
}
