//! A worker that freezes, as by SIGSTOP: its port still accepts connections, and requests for its cached prefixes
//! would all go there.

use http::StatusCode;
use mla_mock_worker::{MockWorker, Settings};
use mla_router::{Config, RouterHandle, fleet::Phase};
use tokio::time::Instant;

use crate::support::{
    Client, Process, all_in, assert_nothing_reserved, router_without_waiting, secs, soon,
};

/// Settings with long deadlines, which would hide the tested behaviour.
fn patient() -> Config {
    Config { first_token_timeout_secs: secs(1800.0), ..Config::default() }
}

/// A prompt whose prefix is cached on one worker.
fn ask(number: usize) -> String {
    let shared = "All happy families are alike. ".repeat(100);
    format!(r#"{{"prompt":"{shared}{number}","max_tokens":2,"stream":true}}"#)
}

async fn in_front_of(urls: &[String]) -> RouterHandle {
    let worker_urls = urls.iter().map(|url| url.parse().expect("a URL")).collect();
    let router = router_without_waiting(Config { worker_urls, ..patient() }, &[]).await;
    all_in(Phase::Healthy, &router).await;
    router
}

/// Sends `count` requests at once. All are answered; returns the time of the slowest.
async fn ask_at_once(router: &RouterHandle, requests: usize) -> f64 {
    let address = router.local_addr();
    let mut asked = Vec::new();
    for number in 0..requests {
        asked.push(tokio::spawn(async move {
            let begun = Instant::now();
            let answer = Client::connect(address).await.post("/v1/completions", ask(number)).await;
            assert_eq!(answer.status, StatusCode::OK);
            assert!(answer.body.ends_with(b"data: [DONE]\n\n"), "{:?}", answer.body);
            begun.elapsed().as_secs_f64()
        }));
    }
    let mut slowest = 0.0_f64;
    for asked in asked {
        slowest = slowest.max(soon(asked).await.expect("answered in full"));
    }
    slowest
}

async fn until_phase(router: &RouterHandle, url: &str, phases: &[Phase]) {
    let registry = &router.router().registry;
    let is_so = |worker: &std::sync::Arc<mla_router::fleet::Replica>| {
        worker.backend.url.as_str() != url || phases.contains(&worker.backend.phase())
    };
    soon(registry.wait_until(|workers| workers.iter().all(is_so))).await;
}

/// Index of the worker with the prefix of the prompts.
async fn warm(router: &RouterHandle) -> usize {
    ask_at_once(router, 1).await;
    let held = |worker: &mla_router::fleet::WorkerView| {
        router.router().tree.owned_by(mla_router::names::WorkerId(worker.id)) > 0
    };
    router.workers().iter().position(held).expect("the tree has noted it")
}

#[tokio::test(start_paused = true)]
async fn requests_for_the_cached_prefix_of_a_frozen_worker_are_answered_by_another() {
    let mut workers = Vec::new();
    for _ in 0..2 {
        workers.push(MockWorker::start(Settings::instant()).await.expect("a free port"));
    }
    let urls: Vec<String> = workers.iter().map(MockWorker::url).collect();
    let router = in_front_of(&urls).await;
    let frozen = warm(&router).await;
    let held = router.router().tree.owned_by(mla_router::names::WorkerId(0));
    workers[frozen].freeze();
    let begun = Instant::now();
    let (slowest, ()) = tokio::join!(ask_at_once(&router, 100), async {
        until_phase(&router, &urls[frozen], &[Phase::Suspect, Phase::Down]).await;
        println!("frozen worker out of rotation after {:.2} s", begun.elapsed().as_secs_f64());
    });
    println!("slowest of 100 requests at the time: {slowest:.2} s");
    println!("slowest of 100 after it: {:.3} s", ask_at_once(&router, 100).await);
    assert!(workers[1 - frozen].stats().totals.requests >= 200);

    let thawed = Instant::now();
    workers[frozen].thaw();
    until_phase(&router, &urls[frozen], &[Phase::Healthy]).await;
    println!("back in rotation {:.2} s after it goes on", thawed.elapsed().as_secs_f64());
    let id = mla_router::names::WorkerId(0);
    assert!(router.router().tree.owned_by(id) >= held, "the same process has the same cache");
    ask_at_once(&router, 10).await;
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_a_stopped_process_go_elsewhere() {
    // The worker is a router process in front of it, because a process can be stopped.
    let mock = MockWorker::start(Settings::instant()).await.expect("a free port");
    let mut processes = Vec::new();
    let mut urls = Vec::new();
    for _ in 0..2 {
        let mut process = Process::start(&["--port", "0", "--worker-urls", &mock.url()]);
        urls.push(format!("http://{}", process.address().await));
        processes.push(process);
    }
    let router = in_front_of(&urls).await;
    let frozen = warm(&router).await;
    processes[frozen].signal("STOP");
    // Only the health checks can detect it: all other limits are half an hour away.
    let slowest = ask_at_once(&router, 20).await;
    println!("slowest of 20 requests after SIGSTOP: {slowest:.2} s");
    until_phase(&router, &urls[frozen], &[Phase::Suspect, Phase::Down]).await;
    processes[frozen].signal("CONT");
    let resumed = Instant::now();
    until_phase(&router, &urls[frozen], &[Phase::Healthy]).await;
    println!("back in rotation {:.2} s after SIGCONT", resumed.elapsed().as_secs_f64());
    assert_nothing_reserved(&router).await;
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_of_a_removed_dead_worker_are_retried() {
    let mut workers = Vec::new();
    for _ in 0..2 {
        workers.push(MockWorker::start(Settings::instant()).await.expect("a free port"));
    }
    let urls: Vec<String> = workers.iter().map(MockWorker::url).collect();
    let router = in_front_of(&urls[..1]).await;
    workers[0].freeze();
    let address = router.local_addr();
    let asked = tokio::spawn(async move {
        Client::connect(address).await.post("/v1/completions", ask(0)).await.status
    });
    while router.workers()[0].requests == 0 {
        tokio::task::yield_now().await;
    }
    router.remove_worker(&urls[0]).expect("there");
    router.add_worker(&urls[1]).expect("new");
    assert_eq!(soon(asked).await.expect("no panic"), StatusCode::OK);
}
