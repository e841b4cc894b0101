//! Nothing waits for ever: not for a client's head, not for a worker.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body_util::BodyExt;
use mla_router::{Config, fleet::worker::Phase};
use tokio::sync::mpsc;

use crate::support::{
    Client, Event, FakeWorker, Reply, assert_nothing_booked, config, post, router, secs,
};

/// The clock stands still while anything moves and jumps to the next timer when nothing does.
#[tokio::test(start_paused = true)]
async fn an_idle_client_may_come_back_after_a_minute() {
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..3 {
        assert_eq!(client.get("/health").await.status, StatusCode::OK);
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_does_not_answer_is_a_504_and_is_let_go() {
    let mut worker = FakeWorker::start(|_| Reply::Hang).await;
    let config = Config { request_timeout_secs: secs(0.05), ..config() };
    let router = router(config, &[&worker]).await;
    let answer = Client::connect(router.local_addr()).await.post("/generate", "{}").await;
    assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(answer.error_code(), "timeout");
    worker.request().await;
    assert!(matches!(worker.event().await, Event::Aborted));
    assert_eq!(router.workers()[0].phase, Phase::Healthy, "slow is not dead");
    assert_nothing_booked(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_outlives_the_limit_is_cut_and_not_ended() {
    let (frames, source) = mpsc::unbounded_channel();
    let source = parking_lot::Mutex::new(Some(source));
    let mut worker =
        FakeWorker::start(move |_| Reply::Frames(source.lock().take().expect("one request"))).await;
    let config = Config { request_timeout_secs: secs(0.2), ..config() };
    let router = router(config, &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    frames.send(Bytes::from_static(b"data: 1\n\n")).expect("streaming");
    let mut response = client.send(post("/generate", "{}")).await.expect("a head");
    response.frame().await.expect("not over").expect("not broken");
    assert!(matches!(response.frame().await, Some(Err(_))), "the stream must not look whole");
    worker.request().await;
    assert!(matches!(worker.event().await, Event::Aborted));
    assert_nothing_booked(&router).await;
}
