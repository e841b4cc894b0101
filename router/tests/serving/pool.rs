//! Connections to a worker: reused, detected as dead, and never mixed up.

use std::sync::Arc;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use mla_router::{Config, fleet::Phase, upstream::UpstreamError};
use tokio::sync::mpsc;

use crate::support::{Client, Event, FakeWorker, Reply, config, post, router, secs, soon};

fn quiet() -> Config {
    Config { health_check_interval_secs: secs(3600.0), ..config() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequential_clients_share_one_connection() {
    let mut worker = FakeWorker::plain().await;
    let router = router(quiet(), &[&worker]).await;
    let mut used = Vec::new();
    for _ in 0..5 {
        // A new client each time: the router keeps the connection to the worker.
        let mut client = Client::connect(router.local_addr()).await;
        assert_eq!(client.post("/generate", "{}").await.status, StatusCode::OK);
        used.push(worker.request().await.connection);
    }
    assert!(used.windows(2).all(|pair| pair[0] == pair[1]), "{used:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunked_stream_leaves_its_connection_usable() {
    let mut worker = FakeWorker::start(|_| {
        let (frames, source) = mpsc::unbounded_channel();
        frames.send(Bytes::from_static(b"data: [DONE]\n\n")).expect("open");
        Reply::Frames(source)
    })
    .await;
    let router = router(quiet(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let mut used = Vec::new();
    for _ in 0..3 {
        assert_eq!(&client.post("/generate", "{}").await.body[..], b"data: [DONE]\n\n");
        used.push(worker.request().await.connection);
    }
    assert!(used.windows(2).all(|pair| pair[0] == pair[1]), "{used:?}");
}

/// The race of every keep-alive pool: the worker closes an idle connection while a request is written to it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_lost_during_a_request_is_replaced() {
    let seen_before = parking_lot::Mutex::new(std::collections::HashSet::new());
    let mut worker = FakeWorker::start(move |seen| {
        // Answers one request per connection.
        if seen_before.lock().insert(seen.connection) { Reply::good() } else { Reply::Close }
    })
    .await;
    let router = router(quiet(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..3 {
        assert_eq!(client.post("/generate", "{\"text\":\"x\"}").await.status, StatusCode::OK);
    }
    let mut connections = Vec::new();
    for _ in 0..5 {
        connections.push(worker.request().await.connection);
    }
    let first = connections[0];
    assert_eq!(connections, [first, first, first + 1, first + 1, first + 2]);
    assert_eq!(router.workers()[0].phase, Phase::Healthy, "the worker is not to blame");
}

/// An idle connection is not polled. A closed one is detected when a request is sent, and that request must not
/// wait for a response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_on_a_closed_connection_fails() {
    let mut worker = FakeWorker::plain().await;
    let router = router(quiet(), &[&worker]).await;
    let backend = Arc::clone(&router.router().registry.replicas()[0].backend);
    let pool = &backend.pool;
    let mut connection = pool.open().await.expect("the worker listens");
    let request = || Request::post("/generate").body(Bytes::new()).expect("a valid request");
    connection.send(&(&request()).into()).await.expect("an answer");
    connection.read(1000).await.expect("a whole response");
    worker.kill().await;
    let failed = soon(connection.send(&(&request()).into())).await;
    assert!(matches!(failed, Err(UpstreamError::Reset(_))), "{failed:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_worker_gets_a_new_connection() {
    let mut worker = FakeWorker::plain().await;
    let router = router(quiet(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..3 {
        assert_eq!(client.post("/generate", "{}").await.status, StatusCode::OK);
        worker.kill().await;
        worker.restart().await;
    }
    assert_eq!(router.workers()[0].phase, Phase::Healthy);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn aborted_connection_is_not_reused() {
    let (frames, source) = mpsc::unbounded_channel();
    let source = parking_lot::Mutex::new(Some(source));
    let mut worker = FakeWorker::start(move |_| match source.lock().take() {
        Some(source) => Reply::Frames(source),
        None => Reply::ok("second"),
    })
    .await;
    let router = router(quiet(), &[&worker]).await;
    let mut first = Client::connect(router.local_addr()).await;
    frames.send(Bytes::from_static(b"first")).expect("streaming");
    let mut response = first.send(post("/generate", "{}")).await.expect("a head");
    response.frame().await.expect("not over").expect("not broken");
    let left = worker.request().await.connection;
    drop((response, first));
    assert!(matches!(worker.event().await, Event::Aborted));
    let mut second = Client::connect(router.local_addr()).await;
    assert_eq!(&second.post("/generate", "{}").await.body[..], b"second");
    assert_ne!(worker.request().await.connection, left);
}
