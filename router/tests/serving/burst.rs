//! Bursts of requests while workers are unwell. Each request is served or refused with Retry-After: workers that
//! are expected back count as busy.

use std::{collections::BTreeMap, net::SocketAddr};

use http::StatusCode;
use mla_mock_worker::{MockWorker, Settings};
use mla_router::{Config, RouterHandle, config::PolicyName, fleet::Phase};
use tokio::task::JoinHandle;

use crate::support::{
    Client, FakeWorker, Reply, all_in, assert_nothing_reserved, config, router, secs, soon,
};

const BURST: usize = 400;
const QUEUE: usize = 64;
const PATH: &str = "/v1/completions";

/// Status of a response, and the code of an error of the router.
type End = (u16, String);

async fn ask(address: SocketAddr, number: usize) -> End {
    let body = format!(r#"{{"prompt":"{number}","max_tokens":4}}"#);
    let answer = Client::connect(address).await.post(PATH, body).await;
    if answer.status == StatusCode::OK {
        return (200, String::new());
    }
    assert!(answer.headers.contains_key("retry-after"), "{:?}", answer.body);
    let code = answer.json()["error"]["code"].as_str().unwrap_or_default().to_owned();
    (answer.status.as_u16(), code)
}

/// Number of simultaneous clients.
fn burst(router: &RouterHandle) -> Vec<JoinHandle<End>> {
    let address = router.local_addr();
    (0..BURST).map(|number| tokio::spawn(ask(address, number))).collect()
}

async fn ends(clients: Vec<JoinHandle<End>>) -> BTreeMap<End, usize> {
    let mut ends = BTreeMap::new();
    for client in clients {
        *ends.entry(soon(client).await.expect("no panic")).or_default() += 1;
    }
    ends
}

fn small_queue() -> Config {
    Config { queue_size: QUEUE, policy: PolicyName::RoundRobin, ..config() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn burst_beside_a_frozen_worker_is_served_or_refused() {
    let frozen = FakeWorker::start(|_| Reply::Hang).await;
    let settings = Settings {
        max_running_requests: 4,
        max_queued_requests: 16,
        decode_base_ms: 5.0,
        ..Settings::default()
    };
    let other = MockWorker::start(settings).await.expect("a free port");
    let config = Config { health_check_timeout_secs: secs(1.0), ..small_queue() };
    let router = router(config, &[&frozen]).await;
    router.add_worker(&other.url()).expect("new");
    all_in(Phase::Healthy, &router).await;
    frozen.freeze();
    let ends = ends(burst(&router)).await;
    assert!(ends.keys().all(|(status, _)| matches!(status, 200 | 429)), "{ends:?}");
    assert!(ends[&(200, String::new())] >= QUEUE, "{ends:?}");
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_queue_for_recovering_workers_is_a_429() {
    let mut killed = FakeWorker::plain().await;
    let other = FakeWorker::plain().await;
    // The workers stay out of rotation and are not down.
    let config = Config { health_failure_threshold: u32::MAX, ..small_queue() };
    let router = router(config, &[&killed, &other]).await;
    killed.kill().await;
    other.set_healthy(false);
    all_in(Phase::Suspect, &router).await;
    let mut clients = burst(&router);
    // Each request waits or has its response.
    let mut refused = Vec::new();
    while clients.len() > QUEUE {
        let (ended, open): (Vec<_>, Vec<_>) =
            clients.into_iter().partition(JoinHandle::is_finished);
        refused.extend(ended);
        clients = open;
        tokio::task::yield_now().await;
    }
    assert_eq!(ends(refused).await, BTreeMap::from([((429, "queue_full".into()), BURST - QUEUE)]));
    other.set_healthy(true);
    assert_eq!(ends(clients).await, BTreeMap::from([((200, String::new()), QUEUE)]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_queue_for_workers_that_are_down_is_a_503() {
    let worker = FakeWorker::plain().await;
    let router = router(Config { queue_size: 1, ..small_queue() }, &[&worker]).await;
    worker.set_healthy(false);
    all_in(Phase::Down, &router).await;
    let address = router.local_addr();
    let waiting =
        tokio::spawn(async move { Client::connect(address).await.post(PATH, "{}").await.status });
    while router.router().queue.waiting() == 0 {
        tokio::task::yield_now().await;
    }
    let mut client = Client::connect(address).await;
    let answer = client.post(PATH, "{}").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.error_code(), "no_healthy_worker");
    assert_eq!(client.get("/readiness").await.status, StatusCode::SERVICE_UNAVAILABLE);
    worker.set_healthy(true);
    assert_eq!(soon(waiting).await.expect("no panic"), StatusCode::OK);
}
