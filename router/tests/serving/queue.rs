//! While no worker is healthy, requests wait: bounded in time and in number.

use http::StatusCode;
use mla_router::{Config, fleet::worker::Phase};

use crate::support::{Client, FakeWorker, all_in, config, router, router_without_waiting, secs};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_for_the_first_worker() {
    let mut worker = FakeWorker::plain().await;
    let router = router_without_waiting(config(), &[]).await;
    let address = router.local_addr();
    let waiting =
        tokio::spawn(async move { Client::connect(address).await.post("/generate", "{}").await });
    while router.router().waiting() == 0 {
        tokio::task::yield_now().await;
    }
    router.add_worker(&worker.url()).expect("new");
    assert_eq!(waiting.await.expect("no panic").status, StatusCode::OK);
    worker.request().await;
    assert_eq!(router.router().waiting(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_of_the_only_worker_costs_no_request() {
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
    while router.router().waiting() < 20 {
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
async fn the_queue_has_an_end() {
    let config = Config { queue_size: 2, ..config() };
    let router = router_without_waiting(config, &[]).await;
    let address = router.local_addr();
    let mut waiting = Vec::new();
    for _ in 0..2 {
        waiting.push(tokio::spawn(async move {
            Client::connect(address).await.post("/generate", "{}").await;
        }));
    }
    while router.router().waiting() < 2 {
        tokio::task::yield_now().await;
    }
    let answer = Client::connect(address).await.post("/generate", "{}").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.error_code(), "queue_full");
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    // Clients that leave give their place up.
    while router.router().waiting() > 0 {
        tokio::task::yield_now().await;
    }
}
