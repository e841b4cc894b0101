//! Busy workers: the request is tried on the others, then waits for its turn. At the end the client gets the
//! refusal of the worker.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::StatusCode;
use mla_router::{Config, config::PolicyName, fleet::Phase};
use parking_lot::Mutex;
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::support::{
    Client, FakeWorker, Reply, all_in, assert_nothing_reserved, config, post, router, secs,
};

const PATH: &str = "/v1/completions";

fn prompt(number: usize) -> String {
    format!(r#"{{"prompt":"{number}"}}"#)
}

fn in_turn() -> Config {
    Config { policy: PolicyName::RoundRobin, health_check_interval_secs: secs(3600.0), ..config() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_worker_is_skipped_without_a_failure() {
    for status in [429, 503] {
        let mut busy = FakeWorker::start(move |_| Reply::status(status)).await;
        let good = FakeWorker::plain().await;
        let config = Config { max_retries: 0, cb_failure_threshold: 1, ..in_turn() };
        let router = router(config, &[&busy, &good]).await;
        let mut client = Client::connect(router.local_addr()).await;
        for number in 0..20 {
            assert_eq!(client.post(PATH, prompt(number)).await.status, StatusCode::OK);
        }
        assert_eq!(busy.requests_so_far(), 20, "it stays in rotation");
        all_in(Phase::Healthy, &router).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_gets_the_worker_response_if_all_workers_are_busy() {
    let workers = [
        FakeWorker::start(|_| Reply::status(429)).await,
        FakeWorker::start(|_| Reply::status(429)).await,
    ];
    let config = Config { queue_timeout_secs: secs(0.05), ..in_turn() };
    let router = router(config, &[&workers[0], &workers[1]]).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, prompt(0)).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(&answer.body[..], b"{\"from\":\"worker\"}");
    assert_eq!(answer.headers["retry-after"], "1");
    assert_nothing_reserved(&router).await;
    assert_eq!(router.router().queue.waiting(), 0);
}

#[tokio::test(start_paused = true)]
async fn client_gets_the_worker_refusal_without_a_queue() {
    let worker = FakeWorker::start(|_| Reply::status(429)).await;
    let router = router(Config { queue_size: 0, ..in_turn() }, &[&worker]).await;
    let begun = Instant::now();
    let answer = Client::connect(router.local_addr()).await.post(PATH, prompt(0)).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(&answer.body[..], b"{\"from\":\"worker\"}");
    assert!(begun.elapsed() < Duration::from_millis(50), "{:?}", begun.elapsed());
}

/// Twenty requests for four places: all are served, in the order of arrival. The clock is paused, so that no
/// refusal is late.
#[tokio::test(start_paused = true)]
async fn oldest_waiting_request_goes_first() {
    let room = Arc::new(AtomicUsize::new(0));
    let served = Arc::new(Mutex::new(Vec::new()));
    let (left, order) = (Arc::clone(&room), Arc::clone(&served));
    let worker = FakeWorker::start(move |seen| {
        let take = |left: usize| left.checked_sub(1);
        if left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_err() {
            return Reply::status(429);
        }
        let body: serde_json::Value = serde_json::from_slice(&seen.body).expect("JSON");
        let number = body["prompt"].as_str().and_then(|text| text.parse::<usize>().ok());
        order.lock().push(number.expect("a number"));
        Reply::good()
    })
    .await;
    let router = router(in_turn(), &[&worker]).await;
    let address = router.local_addr();
    let mut clients = Vec::new();
    for number in 0..20 {
        clients.push(tokio::spawn(async move {
            Client::connect(address).await.post(PATH, prompt(number)).await.status
        }));
        while router.router().queue.waiting() <= number {
            tokio::task::yield_now().await;
        }
    }
    room.store(4, Ordering::SeqCst);
    while served.lock().len() < 4 {
        sleep(Duration::from_millis(1)).await;
    }
    room.store(100, Ordering::SeqCst);
    for client in clients {
        assert_eq!(client.await.expect("no panic"), StatusCode::OK);
    }
    // Each accepted request lets two more try: the next one, and one for the request that has ended.
    assert!(served.lock()[..4].iter().all(|number| *number < 8), "{:?}", served.lock());
    assert_eq!(served.lock().len(), 20);
    assert_nothing_reserved(&router).await;
    assert_eq!(router.router().queue.waiting(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_newcomer_goes_to_the_end_of_the_line_although_there_is_room() {
    let room = Arc::new(AtomicUsize::new(0));
    let (served, left) = (Arc::new(Mutex::new(Vec::new())), Arc::clone(&room));
    let order = Arc::clone(&served);
    let worker = FakeWorker::start(move |seen| {
        if left.load(Ordering::SeqCst) == 0 {
            return Reply::status(429);
        }
        order.lock().push(seen.body.clone());
        Reply::good()
    })
    .await;
    let router = router(in_turn(), &[&worker]).await;
    let address = router.local_addr();
    let ask = |number| {
        tokio::spawn(async move {
            Client::connect(address).await.post(PATH, prompt(number)).await.status
        })
    };
    let first = ask(0);
    while router.router().queue.waiting() == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    room.store(1, Ordering::SeqCst);
    let second = ask(1);
    for asked in [first, second] {
        assert_eq!(asked.await.expect("no panic"), StatusCode::OK);
    }
    assert_eq!(*served.lock(), [prompt(0), prompt(1)]);
}

/// A hundred bodies at once, each within its limit, together ten times the limit for all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_large_bodies_use_bounded_memory() {
    const SIZE: usize = 1 << 20;
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let worker = FakeWorker::start(move |_| Reply::When(Arc::clone(&held))).await;
    let router = router(Config { max_payload_size: 2 * SIZE, ..in_turn() }, &[&worker]).await;
    let address = router.local_addr();
    let clients: Vec<_> = (0..100)
        .map(|_| {
            tokio::spawn(async move {
                let mut client = Client::connect(address).await;
                let body = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(SIZE));
                // A client that is refused during its upload may not be able to read the response.
                client.call(post(PATH, body)).await.map_or(429, |answer| answer.status.as_u16())
            })
        })
        .collect();
    let bodies = &router.router().bodies;
    // Each request is on the worker or was refused.
    while clients.iter().filter(|client| client.is_finished()).count()
        + (router.workers()[0].requests as usize)
        < clients.len()
    {
        assert!(bodies.held() <= 4 * 2 * SIZE, "{} bytes", bodies.held());
        tokio::task::yield_now().await;
    }
    assert!((SIZE..=4 * 2 * SIZE).contains(&bodies.held()), "{} bytes", bodies.held());
    gate.add_permits(100);
    let mut served = 0;
    for client in clients {
        match client.await.expect("no panic") {
            200 => served += 1,
            status => assert_eq!(status, 429),
        }
    }
    assert!((1..=8).contains(&served), "{served} were served");
    assert_nothing_reserved(&router).await;
    assert_eq!(bodies.held(), 0);
}

/// A request that a worker has accepted must not block the requests behind it: each is called when the one before it
/// has left the line, and does not wait for its next try.
#[tokio::test(start_paused = true)]
async fn slow_answer_does_not_block_the_queue() {
    let gate = Arc::new(Semaphore::new(0));
    let (refusing, held) = (Arc::new(AtomicUsize::new(1)), Arc::clone(&gate));
    let state = Arc::clone(&refusing);
    let mut worker = FakeWorker::start(move |_| match state.load(Ordering::SeqCst) {
        0 => Reply::When(Arc::clone(&held)),
        _ => Reply::status(503),
    })
    .await;
    let router = router(in_turn(), &[&worker]).await;
    let address = router.local_addr();
    let clients: Vec<_> = (0..20)
        .map(|number| {
            tokio::spawn(async move {
                Client::connect(address).await.post(PATH, prompt(number)).await.status
            })
        })
        .collect();
    while router.router().queue.waiting() < 20 {
        sleep(Duration::from_millis(1)).await;
    }
    refusing.store(0, Ordering::SeqCst);
    let begun = Instant::now();
    // All are on the worker although none has a response.
    while router.workers()[0].requests < 20 || router.router().queue.waiting() > 0 {
        sleep(Duration::from_millis(1)).await;
    }
    // The first tries after 150 ms at most; each of the others has 10 ms until the next is called.
    assert!(begun.elapsed() < Duration::from_millis(700), "{:?}", begun.elapsed());
    gate.add_permits(20);
    for client in clients {
        assert_eq!(client.await.expect("no panic"), StatusCode::OK);
    }
    worker.requests_so_far();
    assert_nothing_reserved(&router).await;
}

/// A failing worker answers at once, so its load stays the lowest.
#[tokio::test(start_paused = true)]
async fn request_waits_for_a_busy_worker_and_not_for_a_failing_one() {
    let full = Arc::new(AtomicUsize::new(50));
    let turns = Arc::clone(&full);
    let mut busy = FakeWorker::start(move |_| {
        let left = turns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        if left.is_ok() { Reply::status(429) } else { Reply::good() }
    })
    .await;
    let mut failing = FakeWorker::start(|_| Reply::status(500)).await;
    let config = Config { cb_failure_threshold: u32::MAX, ..in_turn() };
    let router = router(config, &[&busy, &failing]).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, prompt(0)).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(busy.requests_so_far(), 51);
    assert_eq!(failing.requests_so_far(), 1);
    assert_nothing_reserved(&router).await;
}

/// A request that waits for a busy worker in any case is no additional load, whatever another worker has failed with.
#[tokio::test(start_paused = true)]
async fn failure_beside_busy_workers_needs_no_retry_budget() {
    const REQUESTS: usize = 200;
    let at_first_busy = || {
        let seen = Mutex::new(HashSet::new());
        FakeWorker::start(move |request| {
            let is_new = seen.lock().insert(request.body.clone());
            if is_new { Reply::status(429) } else { Reply::good() }
        })
    };
    let busy = [at_first_busy().await, at_first_busy().await];
    let mut failing = FakeWorker::start(|_| Reply::status(500)).await;
    let config = Config {
        cb_failure_threshold: u32::MAX,
        // 100 retries in ten seconds are always allowed. A third of the requests meets the failing worker first.
        retry_budget: "0".parse().expect("a share"),
        ..in_turn()
    };
    let router = router(config, &[&busy[0], &busy[1], &failing]).await;
    let mut asking = JoinSet::new();
    for number in 0..REQUESTS {
        let address = router.local_addr();
        asking
            .spawn(async move { Client::connect(address).await.post(PATH, prompt(number)).await });
    }
    for answer in asking.join_all().await {
        assert_eq!(answer.status, StatusCode::OK);
    }
    assert!(failing.requests_so_far() > REQUESTS / 2, "most requests have met it");
    assert_nothing_reserved(&router).await;
}
