//! Shutdown: new requests are refused, requests in flight finish, and the router ends.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::StatusCode;
use mla_mock_worker::Port;
use mla_router::{Config, RouterHandle, StartError, fleet::Phase, handle};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc, oneshot},
};

use crate::support::{
    Answer, Client, Event, FakeWorker, Reply, all_in, config, post, router, router_without_waiting,
    secs, soon,
};

/// A worker that answers on command, and the sender of the command.
async fn gated() -> (FakeWorker, Arc<Semaphore>) {
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    (FakeWorker::start(move |_| Reply::When(Arc::clone(&held))).await, gate)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_finishes_requests_in_flight_and_refuses_new_ones() {
    let (mut worker, gate) = gated().await;
    // Keeps the port reserved after the router has closed it.
    let port = Port::free().expect("a free port");
    let listener = TcpListener::bind(port.address()).await.expect("the port is ours");
    let config = Config { worker_urls: vec![worker.url().parse().expect("valid")], ..config() };
    let router = RouterHandle::serve(listener, config).await.expect("a config to start with");
    all_in(Phase::Healthy, &router).await;
    let address = router.local_addr();
    let inside =
        tokio::spawn(async move { Client::connect(address).await.post("/generate", "{}").await });
    worker.request().await;
    assert!(!router.drain(Duration::from_millis(1)).await, "one request is inside");
    let mut client = Client::connect(address).await;
    let refused = soon(client.post("/generate", "{}")).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.error_code(), "draining");
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(refused.headers["connection"], "close", "so that it comes back to another router");
    let mut client = Client::connect(address).await;
    assert_eq!(client.get("/readiness").await.status, StatusCode::SERVICE_UNAVAILABLE);
    let mut client = Client::connect(address).await;
    assert_eq!(client.get("/liveness").await.status, StatusCode::OK);
    gate.add_permits(1);
    assert_eq!(inside.await.expect("no panic").status, StatusCode::OK);
    assert!(router.drain(Duration::from_secs(60)).await);
    router.stop(Duration::from_secs(60)).await;
    // A child process of another test may have a copy of the listener until it executes its program.
    let closed = async { while TcpStream::connect(address).await.is_ok() {} };
    soon(closed).await;
}

/// Runs `handle::run` like the binary; the test has the listener and both signals.
struct Running {
    worker: FakeWorker,
    gate: Arc<Semaphore>,
    inside: tokio::task::JoinHandle<Answer>,
    drain: oneshot::Sender<()>,
    stop: oneshot::Sender<()>,
    server: tokio::task::JoinHandle<Result<(), StartError>>,
}

async fn running(config: Config) -> Running {
    let (mut worker, gate) = gated().await;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let config = Config { worker_urls: vec![worker.url().parse().expect("valid")], ..config };
    let (drain, draining) = oneshot::channel::<()>();
    let (stop, stopping) = oneshot::channel::<()>();
    let server = tokio::spawn(handle::run(
        listener,
        config,
        async move { draining.await.expect("the test sends") },
        async move {
            if stopping.await.is_err() {
                std::future::pending::<()>().await;
            }
        },
    ));
    let inside =
        tokio::spawn(async move { Client::connect(address).await.post("/generate", "{}").await });
    worker.request().await;
    Running { worker, gate, inside, drain, stop, server }
}

/// A request without a response gets an error with the reason.
fn assert_refused(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.error_code(), "draining");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_returns_after_the_last_request() {
    let running = running(config()).await;
    running.drain.send(()).expect("running");
    running.gate.add_permits(1);
    assert_eq!(running.inside.await.expect("no panic").status, StatusCode::OK);
    running.server.await.expect("no panic").expect("no error");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grace_period_is_bounded() {
    let config = Config { shutdown_grace_period_secs: secs(0.05), ..config() };
    let mut running = running(config).await;
    running.drain.send(()).expect("running");
    running.server.await.expect("no panic").expect("no error");
    assert_refused(&running.inside.await.expect("no panic"));
    assert!(matches!(running.worker.event().await, Event::Aborted));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_does_not_wait_for_the_drain() {
    let mut running = running(config()).await;
    running.drain.send(()).expect("running");
    running.stop.send(()).expect("running");
    running.server.await.expect("no panic").expect("no error");
    assert_refused(&running.inside.await.expect("no panic"));
    assert!(matches!(running.worker.event().await, Event::Aborted));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_stream_ends_with_an_error_event() {
    let (frames, source) = mpsc::unbounded_channel();
    frames.send(Bytes::from_static(b"data: {\"choices\":[1]}\n\n")).expect("streaming");
    let source = parking_lot::Mutex::new(Some(source));
    let mut worker =
        FakeWorker::start(move |_| Reply::Events(source.lock().take().expect("one request"))).await;
    let router = router(config(), &[&worker]).await;
    let address = router.local_addr();
    let inside = tokio::spawn(async move {
        let mut client = Client::connect(address).await;
        client.post("/v1/completions", r#"{"prompt": "a", "stream": true}"#).await
    });
    worker.request().await;
    // The first event is passed on, so there is an open stream.
    while router.stats().first_byte.count == 0 {
        tokio::task::yield_now().await;
    }
    router.stop(Duration::from_millis(1)).await;
    let answer = inside.await.expect("no panic");
    let body = std::str::from_utf8(&answer.body).expect("text");
    let (token, error) = body.split_once("\n\n").expect("two events");
    assert_eq!(token, "data: {\"choices\":[1]}");
    assert!(error.contains(r#""code":"shutting_down""#), "{error}");
    assert!(error.contains("the router is shutting down"), "{error}");
    assert!(matches!(worker.event().await, Event::Aborted));
    drop(frames);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_request_is_refused_at_shutdown() {
    let worker = FakeWorker::plain().await;
    worker.set_healthy(false);
    let router = router_without_waiting(config(), &[&worker]).await;
    let address = router.local_addr();
    let waits = tokio::spawn(async move {
        Client::connect(address).await.post("/v1/completions", r#"{"prompt": "a"}"#).await
    });
    while router.router().queue.waiting() == 0 {
        tokio::task::yield_now().await;
    }
    router.stop(Duration::from_millis(1)).await;
    assert_refused(&waits.await.expect("no panic"));
    assert_eq!(router.stats().requests.client_aborts, 0, "the client is still there");
}

/// The workers stop at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_stop_with_the_router_count_no_failure() {
    let mut worker = FakeWorker::start(|_| Reply::Hang).await;
    let router = router(config(), &[&worker]).await;
    let address = router.local_addr();
    let inside = tokio::spawn(async move {
        Client::connect(address).await.post("/v1/completions", r#"{"prompt": "a"}"#).await
    });
    worker.request().await;
    tokio::join!(router.stop(Duration::from_millis(200)), worker.kill());
    assert_refused(&inside.await.expect("no panic"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_the_handle_stops_all_tasks() {
    let (mut worker, _gate) = gated().await;
    let router = router(config(), &[&worker]).await;
    let address = router.local_addr();
    let inside = tokio::spawn(async move {
        Client::connect(address).await.call(post("/generate", "{}")).await.map(|a| a.status)
    });
    worker.request().await;
    drop(router);
    inside.await.expect("no panic").expect_err("cut off");
    assert!(matches!(worker.event().await, Event::Aborted));
}
