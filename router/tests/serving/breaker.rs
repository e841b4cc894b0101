//! A worker that fails despite good health checks: its breaker takes it out of rotation, and admits it again.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use http_body_util::BodyExt;
use mla_mock_worker::{Fault, Garbage, Kind, MockWorker, Settings};
use mla_router::{
    Config, RouterHandle,
    config::PolicyName,
    fleet::{BreakerState, Phase},
};

use tokio::sync::mpsc;

use crate::support::{
    Client, FakeWorker, Reply, Then, all_in, config, post, request, router, router_without_waiting,
    secs, soon,
};

const BODY: &str = r#"{"prompt":"a","max_tokens":2}"#;
const STREAMED: &str = r#"{"prompt":"a","max_tokens":2,"stream":true}"#;
const EVENT: &[u8] = b"data: {\"choices\":[1]}\n\n";
const DONE: &[u8] = b"data: [DONE]\n\n";

/// A stream that ends after these events.
fn events(events: &[&'static [u8]]) -> Reply {
    let frames = events.iter().map(|event| Bytes::from_static(event)).collect();
    Reply::Stream(HeaderMap::new(), frames, Then::End)
}

/// Round robin, so that a failing worker gets as many requests as possible. Breakers stay open for longer than a test.
fn in_turn() -> Config {
    Config {
        policy: PolicyName::RoundRobin,
        cb_timeout_duration_secs: secs(3600.0),
        retry_budget: 1.0.try_into().expect("a share"),
        ..config()
    }
}

async fn mocks(config: Config, faults: [Option<Kind>; 2]) -> (RouterHandle, [MockWorker; 2]) {
    let start = |fault: Option<Kind>| {
        let fault = fault.map(Fault::from);
        MockWorker::start(Settings { fault, ..Settings::instant() })
    };
    let [first, second] = faults;
    let first = start(first).await.expect("a free port");
    let second = start(second).await.expect("a free port");
    let worker_urls = [&first, &second].map(|worker| worker.url().parse().expect("a URL")).to_vec();
    let router = router_without_waiting(Config { worker_urls, ..config }, &[]).await;
    all_in(Phase::Healthy, &router).await;
    (router, [first, second])
}

fn breakers(router: &RouterHandle) -> Vec<BreakerState> {
    router.workers().iter().map(|worker| worker.breaker).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_worker_gets_five_requests_and_no_client_fails() {
    for status in [500, 502, 504] {
        let mut failing = FakeWorker::start(move |_| Reply::status(status)).await;
        let good = FakeWorker::plain().await;
        let router = router(in_turn(), &[&failing, &good]).await;
        let mut client = Client::connect(router.local_addr()).await;
        for _ in 0..20 {
            assert_eq!(client.post("/v1/completions", BODY).await.status, StatusCode::OK);
        }
        assert_eq!(failing.requests_so_far(), 5, "{status}");
        assert_eq!(breakers(&router), [BreakerState::Open, BreakerState::Closed]);
        all_in(Phase::Healthy, &router).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_and_resets_count_as_failures() {
    let faults = [
        Kind::Garbage { form: Garbage::Html },
        Kind::Garbage { form: Garbage::Truncated },
        Kind::Garbage { form: Garbage::Empty },
        Kind::Break { after_tokens: 0 },
    ];
    for fault in faults {
        let (router, [bad, _good]) = mocks(in_turn(), [Some(fault.clone()), None]).await;
        let mut client = Client::connect(router.local_addr()).await;
        for _ in 0..20 {
            // A connection that breaks takes the worker out until its next check.
            all_in(Phase::Healthy, &router).await;
            let answer = client.post("/v1/completions", BODY).await;
            assert_eq!(answer.status, StatusCode::OK, "{fault:?}");
            assert!(String::from_utf8_lossy(&answer.body).contains("choices"), "{fault:?}");
        }
        assert_eq!(breakers(&router)[0], BreakerState::Open, "{fault:?}");
        drop(bad);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_errors_and_backpressure_are_no_failures() {
    for status in [400, 404, 422, 429, 503] {
        let answering = FakeWorker::start(move |_| Reply::status(status)).await;
        let config = Config { queue_timeout_secs: secs(0.01), ..in_turn() };
        let router = router(config, &[&answering]).await;
        let mut client = Client::connect(router.local_addr()).await;
        for _ in 0..10 {
            client.post("/v1/completions", BODY).await;
        }
        assert_eq!(breakers(&router), [BreakerState::Closed], "{status}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovered_worker_is_found_by_one_trial_request() {
    let broken = Arc::new(AtomicBool::new(true));
    let state = Arc::clone(&broken);
    let mut failing = FakeWorker::start(move |_| {
        if state.load(Ordering::SeqCst) { Reply::status(500) } else { Reply::good() }
    })
    .await;
    let good = FakeWorker::plain().await;
    let config = Config { cb_timeout_duration_secs: secs(0.05), ..in_turn() };
    let router = router(config, &[&failing, &good]).await;
    let mut client = Client::connect(router.local_addr()).await;
    while breakers(&router)[0] != BreakerState::Open {
        assert_eq!(client.post("/v1/completions", BODY).await.status, StatusCode::OK);
    }
    failing.requests_so_far();
    broken.store(false, Ordering::SeqCst);
    while breakers(&router)[0] != BreakerState::Closed {
        assert_eq!(client.post("/v1/completions", BODY).await.status, StatusCode::OK);
    }
    assert_eq!(failing.requests_so_far(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_tried_when_every_breaker_is_open() {
    let broken = Arc::new(AtomicBool::new(true));
    let state = Arc::clone(&broken);
    let only = FakeWorker::start(move |_| {
        if state.load(Ordering::SeqCst) { Reply::status(500) } else { Reply::good() }
    })
    .await;
    let router = router(Config { max_retries: 0, ..in_turn() }, &[&only]).await;
    let mut client = Client::connect(router.local_addr()).await;
    while breakers(&router)[0] != BreakerState::Open {
        assert_eq!(client.post("/v1/completions", BODY).await.status.as_u16(), 500);
    }
    broken.store(false, Ordering::SeqCst);
    assert_eq!(client.post("/v1/completions", BODY).await.status, StatusCode::OK);
    assert_eq!(breakers(&router), [BreakerState::Closed]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn last_worker_is_tried_with_an_open_breaker() {
    let switches = [true, false].map(|broken| Arc::new(AtomicBool::new(broken)));
    let start = |switch: &Arc<AtomicBool>| {
        let state = Arc::clone(switch);
        FakeWorker::start(move |_| {
            if state.load(Ordering::SeqCst) { Reply::status(500) } else { Reply::good() }
        })
    };
    let (first, second) = (start(&switches[0]).await, start(&switches[1]).await);
    let router = router(in_turn(), &[&first, &second]).await;
    let mut client = Client::connect(router.local_addr()).await;
    while breakers(&router)[0] != BreakerState::Open {
        assert_eq!(client.post("/v1/completions", BODY).await.status, StatusCode::OK);
    }
    // The worker with the closed breaker fails now, and the other worker would answer.
    switches[0].store(false, Ordering::SeqCst);
    switches[1].store(true, Ordering::SeqCst);
    assert_eq!(client.post("/v1/completions", BODY).await.status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn hanging_engine_opens_its_breaker_after_one_late_byte() {
    // Its health checks are good: only requests show the failure.
    let config = Config { first_token_timeout_secs: secs(0.2), ..in_turn() };
    let (router, [stuck, good]) = mocks(config, [Some(Kind::Hang), None]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..10 {
        let answer = client.post("/v1/completions", STREAMED).await;
        assert_eq!(answer.status, StatusCode::OK);
    }
    assert_eq!(breakers(&router), [BreakerState::Open, BreakerState::Closed]);
    assert_eq!(good.stats().totals.requests, 10);
    all_in(Phase::Healthy, &router).await;
    drop(stuck);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_broken_streams_open_the_breaker() {
    let mut failing = FakeWorker::start(|_| events(&[EVENT])).await;
    let good = FakeWorker::start(|_| events(&[EVENT, DONE])).await;
    let router = router(in_turn(), &[&failing, &good]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..20 {
        client.post("/v1/completions", STREAMED).await;
    }
    assert_eq!(failing.requests_so_far(), 5);
    assert_eq!(breakers(&router), [BreakerState::Open, BreakerState::Closed]);
    all_in(Phase::Healthy, &router).await;
}

/// Answers that are too long for a retry break after their start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_broken_answers_open_the_breaker() {
    let start = Bytes::from(format!(r#"{{"choices":[],"text":"{}"#, "a".repeat(9 << 20)));
    let worker = FakeWorker::start(move |_| Reply::Broken(vec![start.clone()])).await;
    let router = router(in_turn(), &[&worker]).await;
    for number in 0..5 {
        assert_eq!(breakers(&router), [BreakerState::Closed], "{number}");
        // A connection that breaks takes the worker out until its next check.
        all_in(Phase::Healthy, &router).await;
        let mut client = Client::connect(router.local_addr()).await;
        assert!(client.call(post("/v1/completions", BODY)).await.is_err());
    }
    assert_eq!(breakers(&router), [BreakerState::Open]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complete_streams_keep_the_breaker_closed() {
    let turn = AtomicUsize::new(0);
    let worker = FakeWorker::start(move |_| {
        let is_whole = turn.fetch_add(1, Ordering::SeqCst) % 5 == 4;
        events(if is_whole { &[EVENT, DONE] } else { &[EVENT] })
    })
    .await;
    let router = router(in_turn(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for number in 0..25 {
        client.post("/v1/completions", STREAMED).await;
        assert_eq!(breakers(&router), [BreakerState::Closed], "{number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trial_stream_closes_the_breaker_at_its_start_and_reopens_it_on_a_break() {
    let (frames, source) = mpsc::unbounded_channel();
    let source = parking_lot::Mutex::new(Some(source));
    let turn = AtomicUsize::new(0);
    let worker = FakeWorker::start(move |_| match turn.fetch_add(1, Ordering::SeqCst) {
        ..5 => events(&[EVENT]),
        _ => Reply::Events(source.lock().take().expect("one request")),
    })
    .await;
    let config = Config { cb_timeout_duration_secs: secs(0.05), ..in_turn() };
    let router = router(config, &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..5 {
        client.post("/v1/completions", STREAMED).await;
    }
    half_open(&router).await;
    frames.send(Bytes::from_static(EVENT)).expect("the worker streams");
    let response = client.send(post("/v1/completions", STREAMED)).await.expect("a head");
    assert_eq!(breakers(&router), [BreakerState::Closed]);
    drop(frames);
    response.into_body().collect().await.expect("an error event");
    assert_ne!(breakers(&router), [BreakerState::Closed]);
}

/// A server answers light requests while its engine fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_engine_work_do_not_affect_the_breaker() {
    let worker = FakeWorker::start(|seen| match seen.head.uri.path() {
        "/v1/completions" => Reply::status(500),
        _ => Reply::good(),
    })
    .await;
    let config = Config { max_retries: 0, cb_timeout_duration_secs: secs(0.05), ..in_turn() };
    let router = router(config, &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let light = [(Method::GET, "/v1/models"), (Method::POST, "/tokenize")];
    for number in 0..5 {
        assert_eq!(breakers(&router), [BreakerState::Closed], "{number}");
        client.post("/v1/completions", BODY).await;
        for (method, path) in light.clone() {
            let answer = client.call(request(method, path, "{}")).await.expect("an answer");
            assert_eq!(answer.status, StatusCode::OK);
        }
    }
    assert_ne!(breakers(&router), [BreakerState::Closed]);
    half_open(&router).await;
    for (method, path) in light {
        client.call(request(method, path, "{}")).await.expect("an answer");
    }
    assert_eq!(breakers(&router), [BreakerState::HalfOpen]);
    // The trial is still open, and this request fails it.
    let openings = || {
        let worker = &router.router().registry.replicas()[0];
        worker.backend.counters.breaker.get(BreakerState::Open)
    };
    assert_eq!(openings(), 1);
    client.post("/v1/completions", BODY).await;
    assert_eq!(openings(), 2);
}

async fn half_open(router: &RouterHandle) {
    soon(async {
        while breakers(router) != [BreakerState::HalfOpen] {
            tokio::task::yield_now().await;
        }
    })
    .await;
}
