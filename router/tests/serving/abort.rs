//! A disconnected client aborts its request on the worker, before and during the response.

use bytes::Bytes;
use http::HeaderMap;
use http_body_util::BodyExt;
use tokio::sync::mpsc;

use crate::support::{
    Client, Event, FakeWorker, Reply, Then, assert_nothing_reserved, config, post, router,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnect_before_the_response_aborts_upstream() {
    let mut worker = FakeWorker::start(|_| Reply::Hang).await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let waiting = tokio::spawn(async move {
        let _never = client.send(post("/v1/completions", r#"{"prompt":"x"}"#)).await;
    });
    worker.request().await;
    assert_eq!(router.workers()[0].requests, 1);
    waiting.abort();
    assert!(matches!(worker.event().await, Event::Aborted));
    assert_nothing_reserved(&router).await;
    let metrics = mla_router::admin::metrics::render(router.router());
    assert!(metrics.contains("mla_router_client_aborts_total 1"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnect_in_the_response_aborts_upstream() {
    type Start = fn(mpsc::UnboundedReceiver<Bytes>) -> Reply;
    let streamed = r#"{"prompt":"x","stream":true}"#;
    for (body, start) in [("{}", Reply::Frames as Start), (streamed, Reply::Events)] {
        let (frames, source) = mpsc::unbounded_channel();
        let source = parking_lot::Mutex::new(Some(source));
        let mut worker =
            FakeWorker::start(move |_| start(source.lock().take().expect("one request"))).await;
        let router = router(config(), &[&worker]).await;
        let mut client = Client::connect(router.local_addr()).await;
        frames.send(Bytes::from_static(b"data: {\"text\":\"1\"}\n\n")).expect("streaming");
        let mut response = client.send(post("/generate", body)).await.expect("a head");
        response.frame().await.expect("not over").expect("not broken");
        worker.request().await;
        drop(response);
        drop(client);
        assert!(matches!(worker.event().await, Event::Aborted));
        assert_nothing_reserved(&router).await;
        assert_eq!(router.stats().requests.client_aborts, 1, "{body}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whole_answers_are_no_aborts() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for path in ["/generate", "/v1/completions", "/v1/models"] {
        client.post(path, r#"{"prompt":"x"}"#).await;
    }
    assert_nothing_reserved(&router).await;
    assert_eq!(router.stats().requests.client_aborts, 0);
}

/// Many clients close the connection at `[DONE]`, without waiting for the end of the response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnect_after_the_last_event_is_no_abort() {
    let last = Bytes::from_static(b"data: [DONE]\n\n");
    let worker = FakeWorker::start(move |_| {
        Reply::Stream(HeaderMap::new(), vec![last.clone()], Then::Silence)
    })
    .await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let streamed = post("/generate", r#"{"prompt":"x","stream":true}"#);
    let mut response = client.send(streamed).await.expect("a head");
    response.frame().await.expect("not over").expect("not broken");
    drop(response);
    drop(client);
    assert_nothing_reserved(&router).await;
    assert_eq!(router.stats().requests.client_aborts, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnect_in_the_upload_reaches_no_worker() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n12345";
    drop(crate::support::Raw::send(router.local_addr(), head).await);
    assert_nothing_reserved(&router).await;
    assert_eq!(worker.requests_so_far(), 0);
}
