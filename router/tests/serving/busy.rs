//! Workers that are too busy for a health check stay in rotation. The last one stays until there is no sign of
//! life. The paused clock advances to the next timer when all tasks are idle.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use mla_router::{Config, RouterHandle, config::PolicyName, fleet::Phase};
use tokio::time::sleep;

use crate::support::{Client, FakeWorker, Reply, Then, all_in, config, router, secs};

const PATH: &str = "/v1/completions";

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
