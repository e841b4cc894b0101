//! Several times the load that workers and queue can hold. The router serves as many requests as it can, refuses the rest with
//! Retry-After, and its memory does not grow with the refusals.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use http::StatusCode;
use mla_mock_worker::{MockWorker, Settings};
use tokio::task::JoinSet;

use crate::support::{Client, Process, soon};

/// Places on the workers and in the queue; there are five times as many clients.
const RUNNING: usize = 4;
const QUEUED: usize = 8;
const CLIENTS: usize = 5 * (RUNNING + QUEUED);

/// Answers for each client.
const ANSWERS: usize = 2;

/// Least size of a request in bytes.
const BODY: usize = 16 << 10;

/// Largest growth of the router's memory from the first answers to the last.
const GROWTH: u64 = 16 << 20;

/// Least number of refused requests: their bodies would exceed that growth.
const REFUSALS: usize = GROWTH as usize / BODY + 1;

/// Responses to all clients so far.
#[derive(Default)]
struct Responses {
    answers: AtomicUsize,
    refusals: AtomicUsize,
}

/// Returns the value of a series in the router's metrics.
async fn metric(client: &mut Client, series: &str) -> u64 {
    let page = client.get("/metrics").await.body;
    let page = std::str::from_utf8(&page).expect("text");
    let line = page.lines().find_map(|line| line.strip_prefix(series));
    line.unwrap_or_else(|| panic!("no {series}")).trim().parse().expect("a number")
}

/// A client that ignores Retry-After and retries at once.
async fn insist(address: SocketAddr, body: String, responses: Arc<Responses>) {
    let mut client = Client::connect(address).await;
    let mut served = 0;
    while served < ANSWERS || responses.refusals.load(Ordering::Relaxed) < REFUSALS {
        let answer = client.post("/v1/completions", body.clone()).await;
        match answer.status {
            StatusCode::OK => {
                assert_eq!(answer.json()["choices"][0]["finish_reason"], "length");
                responses.answers.fetch_add(1, Ordering::Relaxed);
                served += 1;
            }
            status => {
                assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{:?}", answer.body);
                assert_eq!(answer.error_code(), "queue_full");
                let advice = answer.headers["retry-after"].to_str().expect("text");
                let seconds: u64 = advice.parse().expect("seconds");
                assert!((1..=60).contains(&seconds), "{seconds}");
                responses.refusals.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Number of requests on all workers at one time: two consecutive reads agree.
fn requests_on(workers: &[MockWorker]) -> usize {
    let look = || -> Vec<_> {
        let stats = workers.iter().map(MockWorker::stats);
        stats.map(|stats| (stats.running + stats.waiting, stats.totals.requests)).collect()
    };
    let (mut before, mut now) = (look(), look());
    while now != before {
        (before, now) = (now, look());
    }
    now.iter().map(|(requests, _)| requests).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_times_the_load_is_served_or_refused_with_retry_after() {
    let settings = Settings {
        kv_tokens: 1 << 24,
        max_running_requests: RUNNING / 2,
        decode_base_ms: 10.0,
        decode_per_request_ms: 0.0,
        prefill_rate: f64::INFINITY,
        ..Settings::default()
    };
    let mut workers = Vec::new();
    for _ in 0..2 {
        workers.push(MockWorker::start(settings.clone()).await.expect("a free port"));
    }
    let [first, second] = [&workers[0], &workers[1]].map(MockWorker::url);
    let (running, queued) = (RUNNING.to_string(), QUEUED.to_string());
    let mut router = Process::start(&[
        "--port",
        "0",
        "--worker-urls",
        &first,
        &second,
        "--max-concurrent-requests",
        &running,
        "--queue-size",
        &queued,
    ]);
    let address = router.address().await;
    for _ in &workers {
        router.line_with("is up").await;
    }
    let responses = Arc::new(Responses::default());
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        let prompt = format!("{number} ").repeat(8 << 10);
        let body = format!(r#"{{"prompt":"{prompt}","max_tokens":10}}"#);
        assert!(body.len() > BODY);
        clients.spawn(insist(address, body, Arc::clone(&responses)));
    }
    let mut watching = Client::connect(address).await;
    let mut early = None;
    while !clients.is_empty() {
        let waiting = metric(&mut watching, "mla_router_requests_waiting ").await;
        assert!(waiting <= QUEUED as u64, "{waiting} requests in the queue");
        let there = requests_on(&workers);
        assert!(there <= RUNNING, "{there} requests on the workers");
        let memory = metric(&mut watching, "process_resident_memory_bytes ").await;
        if early.is_none() && responses.answers.load(Ordering::Relaxed) >= CLIENTS {
            early = Some(memory);
        }
        while let Some(ended) = clients.try_join_next() {
            ended.expect("an answer to every request");
        }
        tokio::task::yield_now().await;
    }
    let after = metric(&mut watching, "process_resident_memory_bytes ").await;
    let early = early.expect("there were that many answers");
    let refused = responses.refusals.load(Ordering::Relaxed);
    println!("{refused} refused, {early} bytes early, {after} after");
    assert!(after < early + GROWTH, "{early} bytes after the first answers, {after} after all");
    // The state is as before.
    let body = r#"{"prompt":"a","max_tokens":1}"#;
    assert_eq!(soon(watching.post("/v1/completions", body)).await.status, StatusCode::OK);
    assert_eq!(metric(&mut watching, "mla_router_requests_waiting ").await, 0);
}
