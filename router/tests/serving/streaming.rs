//! Bytes are passed on as they come, in both directions.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt, channel::Channel};
use tokio::sync::mpsc;

use crate::support::{
    Client, ENDLESS_FRAME, Event, FakeWorker, Reply, config, post, request, router,
};

/// Bytes in which any shift or loss is detectable.
fn pattern(length: usize) -> Bytes {
    (0..length).map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_frame_is_forwarded_immediately() {
    let (frames, source) = mpsc::unbounded_channel();
    let source = parking_lot::Mutex::new(Some(source));
    let worker =
        FakeWorker::start(move |_| Reply::Frames(source.lock().take().expect("one request"))).await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let request = post("/v1/chat/completions", r#"{"messages":[],"stream":true}"#);
    let first = Bytes::from_static(b"data: {\"choices\":[0]}\n\n");
    frames.send(first.clone()).expect("the worker streams");
    let mut response = client.send(request).await.expect("a head with the first frame");
    let frame = response.frame().await.expect("not over").expect("not broken");
    assert_eq!(frame.into_data().expect("data"), first);
    for number in 1..100 {
        let event = Bytes::from(format!("data: {{\"n\":{number}}}\n\n"));
        frames.send(event.clone()).expect("the worker streams");
        let frame = response.frame().await.expect("not over").expect("not broken");
        assert_eq!(frame.into_data().expect("data"), event);
    }
    drop(frames);
    assert!(response.frame().await.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_are_byte_identical_both_ways() {
    let worker = FakeWorker::start(|seen| Reply::ok(seen.body.clone())).await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for length in [0, 1, 2048, 70_000, 8 << 20] {
        let body = pattern(length);
        let answer = client.post("/v1/completions", body.clone()).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert!(answer.body == body, "{length} bytes came back different");
        let sent = answer.headers.get("content-length").expect("a known length");
        assert_eq!(sent, &HeaderValue::from(length));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunked_upload_reaches_the_worker_whole() {
    let mut worker = FakeWorker::start(|seen| Reply::ok(seen.body.clone())).await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let body = pattern(3 << 20);
    let (mut upload, source) = Channel::new(1);
    let request = post("/generate", "").map(|_| source.boxed());
    let chunks: Vec<Bytes> = body.chunks(100_001).map(Bytes::copy_from_slice).collect();
    tokio::spawn(async move {
        for chunk in chunks {
            upload.send_data(chunk).await.expect("the client sends");
        }
    });
    let answer = client.call(request).await.expect("a whole response");
    assert!(answer.body == body);
    let seen = worker.request().await;
    assert!(!seen.head.headers.contains_key("transfer-encoding"));
    assert_eq!(seen.head.headers["content-length"], body.len().to_string());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_headers_except_hop_by_hop_are_forwarded() {
    let mut worker = FakeWorker::start(|_| {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("x-mla-prompt-tokens", "128"),
            ("x-mla-cached-tokens", "64"),
            ("x-mla-worker", "w0"),
            ("content-type", "text/event-stream"),
            ("keep-alive", "timeout=75"),
            ("connection", "x-hop"),
            ("x-hop", "1"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        Reply::Whole(StatusCode::CREATED, headers, Bytes::from_static(b"{}"))
    })
    .await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let mut request = post("/v1/chat/completions?trace=1", "{}");
    for (name, value) in [
        ("authorization", "Bearer user"),
        ("x-request-id", "abc"),
        ("connection", "x-secret"),
        ("x-secret", "1"),
        ("te", "trailers"),
        ("expect", "100-continue"),
    ] {
        request.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    let answer = client.call(request).await.expect("a whole response");
    assert_eq!(answer.status, StatusCode::CREATED);
    assert_eq!(answer.headers["x-mla-prompt-tokens"], "128");
    assert_eq!(answer.headers["x-mla-cached-tokens"], "64");
    assert_eq!(answer.headers["x-mla-worker"], "w0");
    assert_eq!(answer.headers["content-type"], "text/event-stream");
    for name in ["keep-alive", "x-hop", "connection"] {
        assert!(!answer.headers.contains_key(name), "{name} reached the client");
    }
    let seen = worker.request().await;
    assert_eq!(seen.head.uri, "/v1/chat/completions?trace=1");
    assert_eq!(seen.head.headers["host"], worker.address().to_string());
    assert_eq!(seen.head.headers["authorization"], "Bearer user");
    assert_eq!(seen.head.headers["x-request-id"], "abc");
    for name in ["x-secret", "te", "expect", "connection"] {
        assert!(!seen.head.headers.contains_key(name), "{name} reached the worker");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_path_of_the_data_plane_is_forwarded() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for (method, path) in [
        (Method::POST, "/v1/chat/completions"),
        (Method::POST, "/v1/completions"),
        (Method::POST, "/generate"),
        (Method::POST, "/v1/embeddings"),
        (Method::POST, "/tokenize"),
        (Method::POST, "/detokenize"),
        (Method::GET, "/v1/models"),
        (Method::GET, "/v1/models/m"),
        (Method::GET, "/get_model_info"),
        (Method::GET, "/model_info"),
    ] {
        let answer = client.call(request(method.clone(), path, "")).await.expect(path);
        assert_eq!(answer.status, StatusCode::OK, "{path}");
        let seen = worker.request().await;
        assert_eq!((seen.head.method, seen.head.uri.path()), (method, path));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_client_applies_backpressure_to_the_worker() {
    let taken = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&taken);
    let mut worker = FakeWorker::start(move |seen| match seen.head.uri.path() {
        "/generate" => Reply::Endless(Arc::clone(&counted)),
        _ => Reply::ok("{}"),
    })
    .await;
    let router = router(config(), &[&worker]).await;
    let mut slow = Client::connect(router.local_addr()).await;
    let mut response = slow.send(post("/generate", "{}")).await.expect("a head");
    response.frame().await.expect("not over").expect("not broken");
    worker.request().await;
    // The stream stops when the buffers on its way are full; other requests are still served.
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
    let held = taken.load(Ordering::Relaxed) * ENDLESS_FRAME;
    assert!(held < 64 << 20, "{held} bytes were taken from the worker");
    drop((response, slow));
    while !matches!(worker.event().await, Event::Aborted) {}
}

/// The body is not needed again once a stream that cannot be continued has started.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn body_memory_is_released_when_no_longer_needed() {
    let (frames, live) = mpsc::unbounded_channel();
    let live = parking_lot::Mutex::new(Some(live));
    let worker =
        FakeWorker::start(move |_| Reply::Events(live.lock().take().expect("one request"))).await;
    let router = router(config(), &[&worker]).await;
    let bodies = &router.router().bodies;
    let body = format!(r#"{{"stream":true,"prompt":"{}"}}"#, "x".repeat(1 << 20));
    let mut client = Client::connect(router.local_addr()).await;
    frames.send("data: {\"choices\":[]}\n\n".into()).expect("a worker that listens");
    let response = client.send(post("/v1/completions", body)).await.expect("a head");
    assert_eq!(bodies.held(), 0, "the stream is still open");
    drop(frames);
    response.into_body().collect().await.expect("an end");
}
