//! Workers stop and come back. The tree keeps only prefixes that the running process can hold.

use http::StatusCode;
use mla_router::{Config, RouterHandle, fleet::Phase, names::WorkerId};

use crate::support::{
    Client, FakeWorker, Reply, all_in, config, router, router_without_waiting, secs, soon,
};

/// A prompt of some blocks.
fn prompt() -> String {
    format!(r#"{{"prompt":"{}"}}"#, "All happy families are alike. ".repeat(40))
}

fn blocks_held(router: &RouterHandle) -> u64 {
    router.router().tree.owned_by(WorkerId(router.workers()[0].id))
}

async fn until_boot_id(router: &RouterHandle, boot_id: &str) {
    let is = |worker: &std::sync::Arc<mla_router::fleet::Replica>| {
        worker.backend.info.load().boot_id.as_deref() == Some(boot_id)
    };
    soon(router.router().registry.wait_until(|workers| workers.iter().all(is))).await;
}

async fn ask(router: &RouterHandle) {
    let mut client = Client::connect(router.local_addr()).await;
    assert_eq!(client.post("/v1/completions", prompt()).await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_suit_no_worker_are_named() {
    let worker = FakeWorker::start(|_| Reply::status(404)).await;
    let plain = worker.url().replace("http://", "https://").replace("127.0.0.1", "localhost");
    let url = |text: &str| text.parse().expect("a valid URL");
    for (worker_urls, path, named) in [
        (vec![url(&worker.url())], "/healthz", "it has no /healthz: --health-check-endpoint"),
        (vec![url(&plain)], "/health", "the worker does not speak TLS; is its URL http://?"),
    ] {
        let health_check_endpoint = path.parse().expect("a path");
        let config = Config { worker_urls, health_check_endpoint, ..config() };
        let router = router_without_waiting(config, &[]).await;
        soon(async {
            while router.workers()[0].trouble.is_none() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        let reason = router.workers()[0].trouble.take().expect("a failed check").reason;
        assert!(reason.contains(named), "{reason}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_check_marks_a_worker_down_and_up_again() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    ask(&router).await;
    let held = blocks_held(&router);
    assert!(held > 0);
    worker.set_healthy(false);
    all_in(Phase::Down, &router).await;
    let mut client = Client::connect(router.local_addr()).await;
    assert_eq!(client.get("/readiness").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(client.get("/health").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(client.get("/liveness").await.status, StatusCode::OK);
    worker.set_healthy(true);
    all_in(Phase::Healthy, &router).await;
    assert_eq!(client.get("/readiness").await.status, StatusCode::OK);
    assert_eq!(blocks_held(&router), held, "no connection broke: it is the same process");
    ask(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn configured_number_of_checks_decides() {
    let worker = FakeWorker::plain().await;
    let config = Config { health_failure_threshold: 2, health_success_threshold: 3, ..config() };
    let router = router(config, &[&worker]).await;
    for _ in 0..3 {
        worker.set_healthy(false);
        all_in(Phase::Down, &router).await;
        worker.set_healthy(true);
        all_in(Phase::Healthy, &router).await;
    }
    let (bad, good) = worker.checks();
    assert!(bad >= 3 * 2, "{bad} failed checks for 3 times down");
    assert!(good >= 4 * 3, "{good} good checks for 4 times up");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_serves_again_after_its_restart() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    ask(&router).await;
    worker.kill().await;
    all_in(Phase::Down, &router).await;
    worker.restart().await;
    all_in(Phase::Healthy, &router).await;
    assert_eq!(blocks_held(&router), 0, "an engine that does not say is taken for another process");
    ask(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_between_two_checks_is_detected_by_boot_id() {
    let mut worker = FakeWorker::plain().await;
    worker.set_info(r#"{"boot_id":"one","max_total_num_tokens":100000}"#);
    // The threshold is so high that the worker is never down.
    let config = Config { health_failure_threshold: u32::MAX, ..config() };
    let router = router(config, &[&worker]).await;
    until_boot_id(&router, "one").await;
    ask(&router).await;
    let held = blocks_held(&router);
    assert!(held > 0);
    worker.kill().await;
    worker.set_info(r#"{"boot_id":"two","max_total_num_tokens":100000}"#);
    worker.restart().await;
    until_boot_id(&router, "two").await;
    assert_eq!(blocks_held(&router), 0);
    ask(&router).await;
    assert_eq!(blocks_held(&router), held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suspect_worker_with_the_same_boot_id_keeps_its_tree_entries() {
    let worker = FakeWorker::start(|seen| match seen.head.uri.path() {
        "/tokenize" => Reply::Close,
        _ => Reply::good(),
    })
    .await;
    worker.set_info(r#"{"boot_id":"one"}"#);
    let config = Config { max_retries: 0, ..config() };
    let router = router(config, &[&worker]).await;
    ask(&router).await;
    let held = blocks_held(&router);
    let mut client = Client::connect(router.local_addr()).await;
    assert_eq!(client.post("/tokenize", "{}").await.status, StatusCode::BAD_GATEWAY);
    all_in(Phase::Healthy, &router).await;
    assert_eq!(blocks_held(&router), held);
}

/// Servers close connections that were idle for too long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_that_closes_idle_connections_keeps_its_tree_entries() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    ask(&router).await;
    let held = blocks_held(&router);
    assert!(held > 0);
    for _ in 0..3 {
        worker.go_away();
        let (_, good) = worker.checks();
        soon(async {
            while worker.checks().1 < good + 3 {
                tokio::task::yield_now().await;
            }
        })
        .await;
        assert_eq!(blocks_held(&router), held);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_info_request_keeps_the_old_info_and_is_repeated() {
    let worker = FakeWorker::plain().await;
    worker.set_info(r#"{"boot_id":"one","max_total_num_tokens":100000}"#);
    let config = Config { health_check_timeout_secs: secs(0.2), ..config() };
    let router = router(config, &[&worker]).await;
    until_boot_id(&router, "one").await;
    ask(&router).await;
    let held = blocks_held(&router);
    assert!(held > 0);
    worker.withhold_info(true);
    worker.set_healthy(false);
    all_in(Phase::Down, &router).await;
    worker.set_healthy(true);
    all_in(Phase::Healthy, &router).await;
    assert_eq!(blocks_held(&router), held);
    assert_eq!(router.workers()[0].boot_id.as_deref(), Some("one"));
    assert_eq!(router.workers()[0].max_total_num_tokens, Some(100_000));

    worker.set_info(r#"{"boot_id":"two","max_total_num_tokens":100000}"#);
    worker.withhold_info(false);
    until_boot_id(&router, "two").await;
    assert_eq!(blocks_held(&router), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tree_capacity_follows_the_cache_of_the_worker() {
    let worker = FakeWorker::plain().await;
    worker.set_info(r#"{"boot_id":"one","max_total_num_tokens":64,"model_path":"m"}"#);
    let router = router(config(), &[&worker]).await;
    ask(&router).await;
    assert_eq!(blocks_held(&router), 4, "64 tokens are 4 blocks of 16");
    assert_eq!(router.workers()[0].max_total_num_tokens, Some(64));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_without_server_info_is_served() {
    for info in [None, Some("not json"), Some(r#"{"max_total_num_tokens":"many"}"#), Some("[]")] {
        let worker = FakeWorker::plain().await;
        if let Some(info) = info {
            worker.set_info(info);
        }
        let router = router(config(), &[&worker]).await;
        ask(&router).await;
        assert!(blocks_held(&router) > 0);
        assert_eq!(router.workers()[0].boot_id, None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_known_before_the_first_request() {
    let mut worker = FakeWorker::plain().await;
    worker.set_models(&["base", "base:adapter"]);
    let router = router(config(), &[&worker]).await;
    assert_eq!(router.workers()[0].models, ["base", "base:adapter"]);
    worker.kill().await;
    worker.set_models(&["other"]);
    worker.restart().await;
    let knows = |worker: &std::sync::Arc<mla_router::fleet::Replica>| {
        worker.backend.phase() == Phase::Healthy && worker.backend.info.load().models == ["other"]
    };
    soon(router.router().registry.wait_until(|workers| workers.iter().all(knows))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushing_empties_the_tree() {
    let mut worker = FakeWorker::plain().await;
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[&worker]).await;
    ask(&router).await;
    worker.request().await;
    let mut client = Client::connect(router.local_addr()).await;
    let answer = client.post("/flush_cache", "").await;
    assert_eq!((answer.status, &answer.json()["success"]), (StatusCode::OK, &true.into()));
    assert_eq!(worker.request().await.head.uri, "/flush_cache");
    assert_eq!(blocks_held(&router), 0);
}
