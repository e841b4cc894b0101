//! Workers that are too busy for a health check stay in rotation. The last one stays until there is no sign of
//! life. The paused clock advances to the next timer when all tasks are idle.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use mla_router::{Config, RouterHandle, config::PolicyName, fleet::Phase};
use parking_lot::Mutex;
use tokio::{
    sync::{Semaphore, mpsc},
    time::{advance, sleep},
};

use crate::support::{Client, FakeWorker, Reply, Then, all_in, config, router, secs};

const PATH: &str = "/v1/completions";
const EVENT: &[u8] = b"data: {\"choices\":[]}\n\n";

fn in_turn() -> Config {
    Config {
        policy: PolicyName::RoundRobin,
        health_check_interval_secs: secs(0.1),
        health_check_timeout_secs: secs(0.1),
        ..config()
    }
}

fn healthy(router: &RouterHandle) -> usize {
    router.workers().iter().filter(|worker| worker.phase == Phase::Healthy).count()
}

#[tokio::test(start_paused = true)]
async fn workers_with_active_streams_survive_missed_checks() {
    let workers = [FakeWorker::plain().await, FakeWorker::plain().await];
    let router = router(in_turn(), &[&workers[0], &workers[1]]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for worker in &workers {
        worker.freeze();
    }
    for _ in 0..300 {
        assert_eq!(client.post(PATH, r#"{"prompt":"x"}"#).await.status, StatusCode::OK);
        assert_eq!(healthy(&router), 2);
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_worker_in_rotation_stays_for_ten_missed_checks() {
    let workers = [FakeWorker::plain().await, FakeWorker::plain().await];
    let router = router(in_turn(), &[&workers[0], &workers[1]]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for worker in &workers {
        worker.freeze();
    }
    sleep(Duration::from_millis(800)).await;
    assert_eq!(healthy(&router), 1, "one of them must be frozen, for all that can be seen");
    assert_eq!(client.get("/readiness").await.status, StatusCode::OK);
    assert_eq!(client.post(PATH, r#"{"prompt":"x"}"#).await.status, StatusCode::OK);
    all_in(Phase::Down, &router).await;
    assert_eq!(client.get("/readiness").await.status, StatusCode::SERVICE_UNAVAILABLE);
}

/// A router that did not run for a minute does not know whether its worker was silent all the time.
#[tokio::test(start_paused = true)]
async fn the_time_in_which_the_router_was_stopped_is_no_silence_of_the_last_worker() {
    let worker = FakeWorker::plain().await;
    let router = router(in_turn(), &[&worker]).await;
    worker.freeze();
    sleep(Duration::from_millis(300)).await;
    advance(Duration::from_secs(60)).await;
    for _ in 0..70 {
        sleep(Duration::from_millis(10)).await;
        assert_eq!(healthy(&router), 1);
    }
    all_in(Phase::Down, &router).await;
}

/// The prompt of a request whose answer is being generated is no pending work.
#[tokio::test(start_paused = true)]
async fn prompt_is_pending_until_response_head_or_expected_prefill_end() {
    for tells in [true, false] {
        let mut worker = FakeWorker::start(move |_| {
            let mut headers = HeaderMap::new();
            if tells {
                headers.insert("x-mla-prompt-tokens", HeaderValue::from_static("2000"));
            }
            Reply::Stream(headers, vec![Bytes::from_static(b"{")], Then::Silence)
        })
        .await;
        let router = router(in_turn(), &[&worker]).await;
        let address = router.local_addr();
        let body = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(8000));
        let asked =
            tokio::spawn(
                async move { Client::connect(address).await.post(PATH, body).await.status },
            );
        worker.request().await;
        assert!(tells || router.workers()[0].pending_tokens > 1000);
        while router.workers()[0].pending_tokens > 0 {
            assert!(!asked.is_finished());
            assert_eq!(router.workers()[0].requests, 1);
            sleep(Duration::from_millis(1)).await;
        }
        asked.abort();
    }
}

/// Out of rotation, and its checks time out: what comes of its streams shows that it lives.
#[tokio::test(start_paused = true)]
async fn a_request_stays_on_a_worker_whose_streams_flow_though_its_checks_time_out() {
    let (frames, source) = mpsc::unbounded_channel();
    let (source, gate) = (Mutex::new(Some(source)), Arc::new(Semaphore::new(0)));
    let held = Arc::clone(&gate);
    let busy = FakeWorker::start(move |_| match source.lock().take() {
        Some(source) => Reply::Events(source),
        None => Reply::When(Arc::clone(&held)),
    })
    .await;
    let others = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&others);
    let other = FakeWorker::start(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        Reply::good()
    })
    .await;
    let router = router(in_turn(), &[&busy, &other]).await;
    let address = router.local_addr();
    let ask = |body: &'static str| {
        tokio::spawn(async move { Client::connect(address).await.post(PATH, body).await.status })
    };
    let on_it = || router.workers()[0].requests;
    frames.send(Bytes::from_static(EVENT)).expect("it will stream");
    let stream = ask(r#"{"prompt":"x","stream":true}"#);
    while on_it() == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    // In turn: the second goes to the other worker.
    assert_eq!(ask(r#"{"prompt":"x"}"#).await.expect("no panic"), StatusCode::OK);
    let waiting = ask(r#"{"prompt":"x"}"#);
    while on_it() == 1 {
        sleep(Duration::from_millis(1)).await;
    }
    busy.freeze();
    router.router().registry.replicas()[0].backend.suspect();
    for _ in 0..200 {
        frames.send(Bytes::from_static(EVENT)).expect("it streams");
        sleep(Duration::from_millis(10)).await;
    }
    assert_ne!(router.workers()[0].phase, Phase::Healthy);
    gate.add_permits(1);
    assert_eq!(waiting.await.expect("no panic"), StatusCode::OK);
    assert_eq!(others.load(Ordering::SeqCst), 1, "the waiting one was not moved");
    drop(frames);
    assert_eq!(stream.await.expect("no panic"), StatusCode::OK);
}
