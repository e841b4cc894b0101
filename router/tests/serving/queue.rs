//! Requests wait in order while no worker can take them, bounded in time and number.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::{HeaderValue, Method, StatusCode, header::AUTHORIZATION};
use mla_router::{Config, RouterHandle, config::QueuePolicy, fleet::Phase, metrics::QueueEnd};
use tokio::{
    sync::Semaphore,
    task::JoinHandle,
    time::{Instant, sleep},
};

use crate::support::{
    Client, FakeWorker, Reply, Seen, all_in, assert_nothing_reserved, config, post, request,
    router, router_without_waiting, secs,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_waits_for_the_first_worker() {
    let mut worker = FakeWorker::plain().await;
    let router = router_without_waiting(config(), &[]).await;
    let address = router.local_addr();
    let waiting =
        tokio::spawn(async move { Client::connect(address).await.post("/generate", "{}").await });
    while router.router().queue.waiting() == 0 {
        tokio::task::yield_now().await;
    }
    router.add_worker(&worker.url()).expect("new");
    assert_eq!(waiting.await.expect("no panic").status, StatusCode::OK);
    worker.request().await;
    assert_eq!(router.router().queue.waiting(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_restart_of_the_only_worker_loses_no_request() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let address = router.local_addr();
    worker.kill().await;
    let mut waiting = Vec::new();
    for _ in 0..20 {
        waiting.push(tokio::spawn(async move {
            Client::connect(address).await.post("/generate", r#"{"text":"x"}"#).await.status
        }));
    }
    while router.router().queue.waiting() < 20 {
        tokio::task::yield_now().await;
    }
    worker.restart().await;
    for waiting in waiting {
        assert_eq!(waiting.await.expect("no panic"), StatusCode::OK);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_wait_has_an_end() {
    let worker = FakeWorker::plain().await;
    let config = Config { queue_timeout_secs: secs(0.05), ..config() };
    let router = router(config, &[&worker]).await;
    worker.set_healthy(false);
    all_in(Phase::Down, &router).await;
    let answer = Client::connect(router.local_addr()).await.post("/generate", "{}").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.error_code(), "no_healthy_worker");
    assert_eq!(answer.headers["retry-after"], "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fleet_that_is_down_is_a_503_at_once_without_a_queue() {
    let mut worker = FakeWorker::plain().await;
    let config = Config { queue_size: 0, queue_timeout_secs: secs(3600.0), ..config() };
    let router = router(config, &[&worker]).await;
    worker.kill().await;
    all_in(Phase::Down, &router).await;
    let mut client = Client::connect(router.local_addr()).await;
    let answer = client.post("/generate", "{}").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.error_code(), "no_healthy_worker");
    assert_eq!(answer.headers["retry-after"], "1");
    worker.restart().await;
    all_in(Phase::Healthy, &router).await;
    assert_eq!(client.post("/generate", "{}").await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_length_is_bounded() {
    let worker = FakeWorker::start(|_| Reply::Hang).await;
    let config = Config {
        max_concurrent_requests: 1.try_into().expect("a number"),
        queue_size: 2,
        ..config()
    };
    let router = router(config, &[&worker]).await;
    let clients = in_order(&router, 3).await;
    let mut client = Client::connect(router.local_addr()).await;
    let answer = client.post("/generate", "{}").await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.error_code(), "queue_full");
    let seconds = answer.headers["retry-after"].to_str().expect("text").parse::<u64>();
    assert!(seconds.is_ok_and(|seconds| seconds >= 1));
    clients.iter().for_each(JoinHandle::abort);
    // A client that disconnects frees its place.
    while router.router().queue.waiting() > 0 {
        tokio::task::yield_now().await;
    }
}

/// Returns the responses to `count` clients that come one after the other.
async fn in_order(router: &RouterHandle, count: usize) -> Vec<JoinHandle<StatusCode>> {
    let address = router.local_addr();
    let mut clients = Vec::new();
    for number in 0..count {
        clients.push(tokio::spawn(async move {
            let body = format!(r#"{{"text":"{number}"}}"#);
            Client::connect(address).await.post("/generate", body).await.status
        }));
        let on_worker = || router.workers()[0].requests as usize;
        while router.router().queue.waiting() + on_worker() < clients.len() {
            tokio::task::yield_now().await;
        }
    }
    clients
}

fn number(seen: &Seen) -> usize {
    let body: serde_json::Value = serde_json::from_slice(&seen.body).expect("JSON");
    body["text"].as_str().and_then(|text| text.parse().ok()).expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrency_limit_is_kept_and_the_queue_is_in_order() {
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let mut worker = FakeWorker::start(move |_| Reply::When(Arc::clone(&held))).await;
    let config = Config { max_concurrent_requests: 1.try_into().expect("a number"), ..config() };
    let router = router(config, &[&worker]).await;
    let clients = in_order(&router, 5).await;
    for expected in 0..5 {
        assert_eq!(number(&*worker.request().await), expected);
        assert_eq!(worker.requests_so_far(), 0, "one at a time");
        assert_eq!(router.workers()[0].requests, 1);
        gate.add_permits(1);
    }
    for client in clients {
        assert_eq!(client.await.expect("no panic"), StatusCode::OK);
    }
    assert_nothing_reserved(&router).await;
    assert_eq!(router.router().queue.waiting(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_request_leaves_the_queue() {
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let mut worker = FakeWorker::start(move |_| Reply::When(Arc::clone(&held))).await;
    let config = Config { max_concurrent_requests: 1.try_into().expect("a number"), ..config() };
    let router = router(config, &[&worker]).await;
    let mut clients = in_order(&router, 3).await;
    assert_eq!(number(&*worker.request().await), 0);
    clients.remove(1).abort();
    while router.router().queue.waiting() > 1 {
        tokio::task::yield_now().await;
    }
    gate.add_permits(2);
    for client in clients {
        assert_eq!(client.await.expect("no panic"), StatusCode::OK);
    }
    assert_eq!(number(&*worker.request().await), 2);
    assert_nothing_reserved(&router).await;
}

/// Sends a request that waits in the queue, then aborts all requests.
async fn aborted_in_the_queue(router: &RouterHandle) {
    let address = router.local_addr();
    let waiting =
        tokio::spawn(async move { Client::connect(address).await.post("/generate", "{}").await });
    while router.router().queue.waiting() == 0 {
        tokio::task::yield_now().await;
    }
    let mut operator = Client::connect(address).await;
    operator.post("/abort_request", r#"{"rid": "another"}"#).await;
    assert_eq!(router.router().queue.waiting(), 1, "one name aborts that request alone");
    operator.post("/abort_request", r#"{"abort_all": true}"#).await;
    let answer = waiting.await.expect("no panic");
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.error_code(), "aborted");
    assert_eq!(answer.headers["x-should-retry"], "false");
    assert_eq!(router.router().queue.waiting(), 0);
    assert_eq!(router.router().metrics.queue.ends.get(QueueEnd::Aborted), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abort_all_ends_the_wait_for_a_worker() {
    let router = router_without_waiting(config(), &[]).await;
    aborted_in_the_queue(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abort_all_ends_the_wait_for_a_slot() {
    let mut worker = FakeWorker::start(|seen| match seen.head.uri.path() {
        "/generate" => Reply::Hang,
        _ => Reply::status(200),
    })
    .await;
    let config = Config { max_concurrent_requests: 1.try_into().expect("a number"), ..config() };
    let router = router(config, &[&worker]).await;
    let address = router.local_addr();
    let running =
        tokio::spawn(async move { Client::connect(address).await.post("/generate", "{}").await });
    worker.request().await;
    aborted_in_the_queue(&router).await;
    running.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_queue_ends_in_a_503() {
    let mut worker = FakeWorker::start(|_| Reply::Hang).await;
    let config = Config {
        max_concurrent_requests: 1.try_into().expect("a number"),
        queue_timeout_secs: secs(0.05),
        ..config()
    };
    let router = router(config, &[&worker]).await;
    let address = router.local_addr();
    let first = tokio::spawn(async move {
        let _never = Client::connect(address).await.post("/generate", "{}").await;
    });
    worker.request().await;
    let mut client = Client::connect(address).await;
    let answer = client.post("/generate", "{}").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.error_code(), "queue_timeout");
    assert_eq!(router.router().metrics.queue.ends.get(QueueEnd::Timeout), 1);
    assert!(answer.headers.contains_key("retry-after"));
    // A light request does not wait.
    let light = client.send(request(Method::GET, "/v1/models", ""));
    tokio::select! {
        _never = light => panic!("the worker hangs"),
        asked = worker.request() => assert_eq!(asked.head.uri, "/v1/models"),
    }
    first.abort();
}

/// Up to --request-timeout-secs, here 20 s.
#[tokio::test(start_paused = true)]
async fn client_header_limits_the_queue_time() {
    for (milliseconds, limit) in [("30", 1), ("3600000", 21)] {
        let config = Config { request_timeout_secs: secs(20.0), ..config() };
        let router = router_without_waiting(config, &[]).await;
        let mut client = Client::connect(router.local_addr()).await;
        let mut request = post("/generate", "{}");
        let wish = HeaderValue::from_static(milliseconds);
        request.headers_mut().insert("x-request-timeout-ms", wish);
        let begun = Instant::now();
        let answer = client.call(request).await.expect("a whole response");
        assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT);
        assert_eq!(answer.error_code(), "timeout");
        let waited = begun.elapsed();
        assert!(waited < Duration::from_secs(limit), "{waited:?} of {milliseconds} ms");
        assert_eq!(router.router().queue.waiting(), 0);
    }
}

/// First for one of --max-concurrent-requests, then for a worker that is busy.
#[tokio::test(start_paused = true)]
async fn all_waits_of_a_request_together_have_an_end() {
    let (gate, taken) = (Arc::new(Semaphore::new(0)), AtomicBool::new(false));
    let held = Arc::clone(&gate);
    let mut worker = FakeWorker::start(move |_| {
        if taken.swap(true, Ordering::SeqCst) {
            Reply::status(429)
        } else {
            Reply::When(Arc::clone(&held))
        }
    })
    .await;
    let config = Config {
        max_concurrent_requests: 1.try_into().expect("a number"),
        queue_timeout_secs: secs(10.0),
        ..config()
    };
    let router = router(config, &[&worker]).await;
    let address = router.local_addr();
    let first =
        tokio::spawn(async move { Client::connect(address).await.post("/generate", "{}").await });
    worker.request().await;
    let begun = Instant::now();
    let second =
        tokio::spawn(async move { Client::connect(address).await.post("/generate", "{}").await });
    sleep(Duration::from_secs(8)).await;
    gate.add_permits(1);
    assert_eq!(first.await.expect("no panic").status, StatusCode::OK);
    assert_eq!(second.await.expect("no panic").status, StatusCode::TOO_MANY_REQUESTS);
    let waited = begun.elapsed().as_secs();
    assert!((10..12).contains(&waited), "{waited} s");
}

/// One client has a hundred requests in the queue when another one comes with three.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fair_queue_keeps_a_flood_of_one_key_from_delaying_another() {
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let mut worker = FakeWorker::start(move |_| Reply::When(Arc::clone(&held))).await;
    let config = Config {
        max_concurrent_requests: 1.try_into().expect("a number"),
        queue_policy: QueuePolicy::Fair,
        api_key: ["flood", "other"].map(|key| key.parse().expect("a key")).to_vec(),
        ..config()
    };
    let router = router(config, &[&worker]).await;
    let address = router.local_addr();
    let mut clients = Vec::new();
    let keys = ["flood"; 100].into_iter().chain(["other"; 3]);
    for (number, key) in keys.enumerate() {
        clients.push(tokio::spawn(async move {
            let mut request = post("/generate", format!(r#"{{"text":"{number}"}}"#));
            let bearer = HeaderValue::from_str(&format!("Bearer {key}")).expect("a header");
            request.headers_mut().insert(AUTHORIZATION, bearer);
            let mut client = Client::connect(address).await;
            client.call(request).await.expect("an answer").status
        }));
        let on_worker = || router.workers()[0].requests as usize;
        while router.router().queue.waiting() + on_worker() < clients.len() {
            tokio::task::yield_now().await;
        }
    }
    gate.add_permits(clients.len());
    for client in clients {
        assert_eq!(client.await.expect("no panic"), StatusCode::OK);
    }
    let mut order = Vec::new();
    for _ in 0..7 {
        order.push(number(&*worker.request().await));
    }
    // The first request was on the worker before any other one waited.
    assert_eq!(order, [0, 1, 100, 2, 101, 3, 102]);
    assert_eq!(router.router().queue.waiting(), 0);
}
