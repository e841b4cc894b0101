//! HTTP/2 to workers: requests share a connection, as many as the worker allows, and are independent.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use http::{StatusCode, Version};
use http_body_util::BodyExt;
use mla_router::{Config, fleet::Phase};
use tokio::sync::{Semaphore, mpsc};

use crate::support::{
    Client, ENDLESS_FRAME, Event, FakeWorker, Reply, Seen, Speaks, assert_nothing_reserved, config,
    post, router, secs,
};

const STREAM: &str = r#"{"prompt":"x","stream":true}"#;

fn http2() -> Config {
    Config { upstream_http2: true, health_check_interval_secs: secs(3600.0), ..config() }
}

async fn worker(script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> FakeWorker {
    FakeWorker::speaking(Speaks::Http2, script).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_at_one_time_share_one_connection() {
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let mut worker = worker(move |_| Reply::When(Arc::clone(&held))).await;
    let router = router(http2(), &[&worker]).await;
    let address = router.local_addr();
    let clients: Vec<_> = (0..50)
        .map(|_| {
            tokio::spawn(async move {
                Client::connect(address)
                    .await
                    .post("/v1/completions?a=1", r#"{"prompt":"x"}"#)
                    .await
            })
        })
        .collect();
    let first = worker.request().await;
    assert_eq!((first.head.version, first.head.method.as_str()), (Version::HTTP_2, "POST"));
    let target = format!("{}/v1/completions?a=1", worker.url());
    assert_eq!(first.head.uri, target.as_str());
    for _ in 1..50 {
        assert_eq!(worker.request().await.connection, first.connection);
    }
    gate.add_permits(50);
    for client in clients {
        assert_eq!(client.await.expect("no panic").status, StatusCode::OK);
    }
    assert_nothing_reserved(&router).await;
}

/// hyper's servers, as the fake worker, allow 200 streams on a connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_beyond_the_streams_of_a_connection_get_another_one() {
    const REQUESTS: usize = 250;
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let mut worker = worker(move |_| Reply::When(Arc::clone(&held))).await;
    let router = router(http2(), &[&worker]).await;
    let address = router.local_addr();
    let mut clients = Vec::new();
    let mut connections = HashSet::new();
    for _ in 0..REQUESTS {
        clients.push(tokio::spawn(async move {
            Client::connect(address).await.post("/v1/completions", r#"{"prompt":"x"}"#).await
        }));
        connections.insert(worker.request().await.connection);
    }
    assert_eq!(connections.len(), 2);
    gate.add_permits(REQUESTS);
    for client in clients {
        assert_eq!(client.await.expect("no panic").status, StatusCode::OK);
    }
    assert_nothing_reserved(&router).await;
}

/// A request that comes while the first connection is being opened uses that connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_found_none_shares_what_was_opened_meanwhile() {
    let worker = worker(|_| Reply::ok("{}")).await;
    let router = router(http2(), &[&worker]).await;
    let backend = Arc::clone(&router.router().registry.replicas()[0].backend);
    let pool = &backend.pool;
    assert!(
        pool.checkout(Instant::now()).is_none(),
        "health checks have a connection of their own"
    );
    let first = pool.connect(None).await.expect("the worker listens");
    let late = pool.connect(None).await.expect("it is open");
    assert_eq!(late.opened_at(), first.opened_at());
    let anew = pool.connect(Some(first.opened_at())).await.expect("the worker listens");
    assert_ne!(anew.opened_at(), first.opened_at(), "that one had broken");
    let next = pool.connect(Some(first.opened_at())).await.expect("it is open");
    assert_eq!(next.opened_at(), anew.opened_at());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_are_byte_identical_both_ways() {
    let worker = worker(|seen| Reply::ok(seen.body.clone())).await;
    let router = router(http2(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for length in [0, 1, 70_000, 8 << 20] {
        let body: Bytes = (0..length).map(|index: usize| ((index * 31) >> 3) as u8).collect();
        let answer = client.post("/v1/embeddings", body.clone()).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert!(answer.body == body, "{length} bytes came back different");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_aborts_upstream_in_both_phases_and_spares_the_connection() {
    let mut worker = worker(|seen| match seen.head.uri.path() {
        "/generate" => Reply::Hang,
        "/v1/embeddings" => Reply::Endless(Arc::default()),
        _ => Reply::ok("{}"),
    })
    .await;
    let router = router(http2(), &[&worker]).await;
    let address = router.local_addr();
    let waiting =
        tokio::spawn(async move { Client::connect(address).await.post("/generate", "{}").await });
    let connection = worker.request().await.connection;
    waiting.abort();
    assert!(matches!(worker.event().await, Event::Aborted));
    let mut client = Client::connect(address).await;
    let mut response = client.send(post("/v1/embeddings", "{}")).await.expect("a head");
    response.frame().await.expect("not over").expect("not broken");
    worker.request().await;
    drop((response, client));
    assert!(matches!(worker.event().await, Event::Aborted));
    assert_eq!(Client::connect(address).await.post("/tokenize", "{}").await.status, StatusCode::OK);
    assert_eq!(worker.request().await.connection, connection);
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_does_not_hold_up_the_others_on_its_connection() {
    let taken = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&taken);
    let mut worker = worker(move |seen| match seen.head.uri.path() {
        "/v1/embeddings" => Reply::Endless(Arc::clone(&counted)),
        _ => Reply::ok("{}"),
    })
    .await;
    let router = router(http2(), &[&worker]).await;
    let mut slow = Vec::new();
    for _ in 0..20 {
        let mut client = Client::connect(router.local_addr()).await;
        let response = client.send(post("/v1/embeddings", "{}")).await.expect("a head");
        slow.push((client, response));
        worker.request().await;
    }
    let mut other = Client::connect(router.local_addr()).await;
    loop {
        let before = taken.load(Ordering::Relaxed);
        for _ in 0..50 {
            assert_eq!(other.post("/tokenize", "{}").await.status, StatusCode::OK);
        }
        if taken.load(Ordering::Relaxed) == before {
            break;
        }
    }
    let held = taken.load(Ordering::Relaxed) * ENDLESS_FRAME / slow.len();
    assert!(held < 16 << 20, "{held} bytes were taken from the worker for each");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_goaway_streams_finish_and_new_requests_get_a_new_connection() {
    let (frames, source) = mpsc::unbounded_channel();
    let source = parking_lot::Mutex::new(Some(source));
    let mut worker = worker(move |_| match source.lock().take() {
        Some(source) => Reply::Frames(source),
        None => Reply::ok("data: {\"choices\":[2]}\n\n"),
    })
    .await;
    let router = router(http2(), &[&worker]).await;
    frames.send(Bytes::from_static(b"data: {\"choices\":[1]}\n\n")).expect("streaming");
    let mut client = Client::connect(router.local_addr()).await;
    let mut response = client.send(post("/v1/completions", STREAM)).await.expect("a head");
    let old = worker.request().await.connection;
    worker.go_away();
    // Until the router has received it, requests still use the old connection; none fails.
    let mut other = Client::connect(router.local_addr()).await;
    loop {
        let answer = other.post("/v1/completions", STREAM).await;
        assert_eq!(
            (answer.status, &answer.body[..]),
            (StatusCode::OK, &b"data: {\"choices\":[2]}\n\n"[..])
        );
        if worker.request().await.connection != old {
            break;
        }
    }
    frames.send(Bytes::from_static(b"data: {\"choices\":[3]}\n\n")).expect("streaming");
    drop(frames);
    let mut rest = Vec::new();
    while let Some(frame) = response.frame().await {
        rest.extend_from_slice(&frame.expect("not broken").into_data().expect("data"));
    }
    assert_eq!(rest, b"data: {\"choices\":[1]}\n\ndata: {\"choices\":[3]}\n\n");
    assert_eq!(router.workers()[0].phase, Phase::Healthy);
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_worker_gets_a_new_connection() {
    let mut worker = worker(|_| Reply::ok("{}")).await;
    let router = router(http2(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..3 {
        assert_eq!(client.post("/generate", "{}").await.status, StatusCode::OK);
        worker.kill().await;
        worker.restart().await;
    }
    assert_eq!(router.workers()[0].phase, Phase::Healthy);
}
