//! Workers with different models behind one router: a request goes to one that serves its model.

use std::time::Duration;

use http::StatusCode;
use mla_router::{Config, RouterHandle, config::PolicyName, fleet::Phase};

use tokio::time::Instant;

use crate::support::{Client, FakeWorker, Reply, all_in, config, router, soon};

const PATHS: [&str; 3] = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"];

fn in_turn() -> Config {
    Config { policy: PolicyName::RoundRobin, ..config() }
}

fn body(model: &str) -> String {
    format!(r#"{{"prompt":"a","messages":[{{"role":"user","content":"a"}}],"model":"{model}"}}"#)
}

async fn serving(models: &[&str]) -> FakeWorker {
    let worker = FakeWorker::plain().await;
    worker.set_models(models);
    worker
}

async fn ask(router: &RouterHandle, model: &str) {
    let mut client = Client::connect(router.local_addr()).await;
    for path in PATHS {
        let answer = client.post(path, body(model)).await;
        assert_eq!(answer.status, StatusCode::OK, "{model} {path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_go_to_workers_with_their_model() {
    let mut small = serving(&["small", "small/tuned"]).await;
    let mut large = serving(&["large"]).await;
    let router = router(in_turn(), &[&small, &large]).await;
    for _ in 0..2 {
        for model in ["small", "small/tuned", r"small\/tuned", "large"] {
            ask(&router, model).await;
        }
    }
    assert_eq!(small.requests_so_far(), 2 * 3 * PATHS.len());
    assert_eq!(large.requests_so_far(), 2 * PATHS.len());
    // A worker that gets an unknown model refuses it itself.
    ask(&router, "unknown").await;
    assert_eq!(small.requests_so_far() + large.requests_so_far(), PATHS.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_restarted_with_another_model_gets_only_its_requests() {
    let mut changing = serving(&["old"]).await;
    let mut staying = serving(&["old"]).await;
    let router = router(in_turn(), &[&changing, &staying]).await;
    ask(&router, "old").await;
    changing.kill().await;
    changing.set_models(&["new"]);
    changing.restart().await;
    let is_new = |worker: &std::sync::Arc<mla_router::fleet::Replica>| {
        worker.backend.phase() == Phase::Healthy && worker.view().models == ["new"]
    };
    soon(router.router().registry.wait_until(|workers| workers.iter().any(is_new))).await;
    changing.requests_so_far();
    staying.requests_so_far();
    for _ in 0..4 {
        ask(&router, "old").await;
    }
    ask(&router, "new").await;
    assert_eq!(changing.requests_so_far(), PATHS.len());
    assert_eq!(staying.requests_so_far(), 4 * PATHS.len());
}

/// A request does not wait in the line of another model.
#[tokio::test(start_paused = true)]
async fn busy_model_does_not_block_other_models() {
    let busy = FakeWorker::start(|_| Reply::status(503)).await;
    busy.set_models(&["busy"]);
    let idle = serving(&["idle"]).await;
    let router = router(in_turn(), &[&busy, &idle]).await;
    let address = router.local_addr();
    let waiting = tokio::spawn(async move {
        Client::connect(address).await.post(PATHS[0], body("busy")).await.status
    });
    while router.router().queue.waiting() == 0 {
        tokio::task::yield_now().await;
    }
    let begun = Instant::now();
    let answer = Client::connect(address).await.post(PATHS[0], body("idle")).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert!(begun.elapsed() < Duration::from_millis(20), "{:?}", begun.elapsed());
    waiting.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_waits_for_a_worker_with_its_model() {
    let mut away = serving(&["wanted"]).await;
    let mut other = serving(&["other"]).await;
    let router = router(in_turn(), &[&away, &other]).await;
    away.set_healthy(false);
    let is_out =
        |worker: &std::sync::Arc<mla_router::fleet::Replica>| worker.backend.phase() == Phase::Down;
    soon(router.router().registry.wait_until(|workers| workers.iter().any(is_out))).await;
    let address = router.local_addr();
    let asked = tokio::spawn(async move {
        Client::connect(address).await.post("/v1/completions", body("wanted")).await.status
    });
    while router.router().queue.waiting() == 0 {
        tokio::task::yield_now().await;
    }
    ask(&router, "other").await;
    assert_eq!(router.router().queue.waiting(), 1);
    away.set_healthy(true);
    all_in(Phase::Healthy, &router).await;
    assert_eq!(soon(asked).await.expect("no panic"), StatusCode::OK);
    assert_eq!((away.requests_so_far(), other.requests_so_far()), (1, PATHS.len()));
}
