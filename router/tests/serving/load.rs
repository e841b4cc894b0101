//! The reserved load of workers: present from the choice of the worker to the end of the request, however it ends.

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use http_body_util::BodyExt;
use tokio::sync::{Semaphore, mpsc};

use crate::support::{
    Client, FakeWorker, Reply, all_in, assert_nothing_reserved, config, post, router, secs, soon,
};
use mla_router::{Config, fleet::Phase};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_has_prompt_tokens_until_the_first_byte_and_the_request_until_the_end() {
    let (frames, source) = mpsc::unbounded_channel();
    let source = parking_lot::Mutex::new(Some(source));
    let mut worker =
        FakeWorker::start(move |_| Reply::Frames(source.lock().take().expect("one request"))).await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let prompt = "word ".repeat(1000);
    let request = post("/v1/completions", format!(r#"{{"prompt":"{prompt}","stream":true}}"#));
    let waiting = tokio::spawn(async move {
        let response = client.send(request).await.expect("a head");
        (client, response)
    });
    worker.request().await;
    let load = &router.workers()[0];
    assert_eq!(load.requests, 1);
    assert!((1000..1500).contains(&load.pending_tokens), "{load:?} for 5000 bytes");
    frames.send(Bytes::from_static(b"data: {\"choices\":[1]}\n\n")).expect("streaming");
    let (_client, mut response) = waiting.await.expect("no panic");
    response.frame().await.expect("not over").expect("not broken");
    let load = &router.workers()[0];
    assert_eq!((load.requests, load.pending_tokens), (1, 0));
    drop(frames);
    assert!(response.frame().await.is_none());
    assert_nothing_reserved(&router).await;
}

/// Each choice sees the reservations of all earlier choices, also of simultaneous ones: a hundred requests at once are
/// spread as evenly as a hundred in a row.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn simultaneous_requests_are_spread() {
    let gate = Arc::new(Semaphore::new(0));
    let mut workers = Vec::new();
    for _ in 0..4 {
        let gate = Arc::clone(&gate);
        workers.push(FakeWorker::start(move |_| Reply::When(Arc::clone(&gate))).await);
    }
    let router = router(config(), &workers.iter().collect::<Vec<_>>()).await;
    let address = router.local_addr();
    let requests: Vec<_> = (0..100)
        .map(|_| {
            tokio::spawn(async move {
                Client::connect(address).await.post("/tokenize", "{}").await.status
            })
        })
        .collect();
    for worker in &mut workers {
        for _ in 0..25 {
            worker.request().await;
        }
    }
    assert!(router.workers().iter().all(|worker| worker.requests == 25), "{:?}", router.workers());
    gate.add_permits(100);
    for request in requests {
        assert_eq!(request.await.expect("no panic"), StatusCode::OK);
    }
    assert_nothing_reserved(&router).await;
}

/// A random generator with a fixed seed, so that every run has the same outcomes.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

fn outcome(random: &mut Random) -> Reply {
    match random.below(8) {
        0 => Reply::status(400),
        1 => Reply::status(503),
        2 => Reply::Close,
        3 => Reply::Broken(vec![Bytes::from_static(b"data: {\"choices\":[1]}\n\n")]),
        4 => Reply::Broken(vec![]),
        5 => Reply::Hang,
        _ => Reply::ok("{}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_load_is_released_after_thousands_of_random_outcomes() {
    let mut workers = Vec::new();
    for seed in 0..3 {
        let random = parking_lot::Mutex::new(Random(seed));
        workers.push(FakeWorker::start(move |_| outcome(&mut random.lock())).await);
    }
    let config = Config { queue_timeout_secs: secs(0.05), ..config() };
    let router = router(config, &workers.iter().collect::<Vec<_>>()).await;
    let address = router.local_addr();
    let mut clients = Vec::new();
    for seed in 0..30 {
        clients.push(tokio::spawn(async move {
            let mut random = Random(1000 + seed);
            for _ in 0..100 {
                let mut client = Client::connect(address).await;
                let body =
                    format!(r#"{{"prompt":"{}"}}"#, "x ".repeat(random.below(2000) as usize));
                let patience = std::time::Duration::from_millis(1 + random.below(20));
                // The client disconnects at a random time.
                let call = client.call(post("/v1/completions", body));
                let _outcome = tokio::time::timeout(patience, call).await;
            }
        }));
    }
    for client in clients {
        client.await.expect("no panic");
    }
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_are_added_and_removed_under_load_without_a_failed_request() {
    let mut workers = Vec::new();
    for _ in 0..4 {
        workers.push(FakeWorker::plain().await);
    }
    let router = router(config(), &[&workers[0]]).await;
    let address = router.local_addr();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let load: Vec<_> = (0..8)
        .map(|number| {
            let stop = Arc::clone(&stop);
            tokio::spawn(async move {
                let mut client = Client::connect(address).await;
                let mut served = 0;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let body = format!(r#"{{"prompt":"{number} {}"}}"#, "y ".repeat(200));
                    assert_eq!(client.post("/v1/completions", body).await.status, StatusCode::OK);
                    served += 1;
                }
                served
            })
        })
        .collect();
    for _ in 0..10 {
        for index in 1..4 {
            router.add_worker(&workers[index].url()).expect("new");
            all_in(Phase::Healthy, &router).await;
            // The worker has served requests before it is removed.
            workers[index].request().await;
            router.remove_worker(&workers[index - 1].url()).expect("known");
            workers[index - 1].requests_so_far();
        }
        router.add_worker(&workers[0].url()).expect("new");
        all_in(Phase::Healthy, &router).await;
        workers[0].request().await;
        router.remove_worker(&workers[3].url()).expect("known");
        workers[3].requests_so_far();
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let mut served = 0;
    for client in load {
        served += client.await.expect("no failed request");
    }
    assert!(served >= 40, "{served} requests were served");
    assert_eq!(router.router().tree.owned_by(mla_router::names::WorkerId(0)), 0);
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_counts_as_its_number_of_answers() {
    for batch in [
        format!(r#"{{"prompt":[{}"b"]}}"#, r#""a","#.repeat(63)),
        r#"{"prompt":"a","n":64}"#.to_owned(),
        r#"{"prompt":["a","b","c","d"],"n":16}"#.to_owned(),
    ] {
        let gate = Arc::new(Semaphore::new(0));
        let start = || {
            let gate = Arc::clone(&gate);
            FakeWorker::start(move |_| Reply::When(Arc::clone(&gate)))
        };
        let workers = [start().await, start().await];
        let router = router(config(), &[&workers[0], &workers[1]]).await;
        let address = router.local_addr();
        let ask = |body: String| {
            tokio::spawn(async move {
                Client::connect(address).await.post("/v1/completions", body).await.status
            })
        };
        let loads = || {
            let mut loads: Vec<_> = router.workers().iter().map(|load| load.requests).collect();
            loads.sort_unstable();
            loads
        };
        let mut asked = vec![ask(batch.clone())];
        let reserved = async |expected: [u32; 2]| {
            while loads().iter().sum::<u32>() < expected.iter().sum() {
                tokio::task::yield_now().await;
            }
            assert_eq!(loads(), expected, "{batch}");
        };
        soon(reserved([0, 64])).await;
        for number in 1..=20 {
            asked.push(ask(format!(r#"{{"prompt":"{number}"}}"#)));
            soon(reserved([number, 64])).await;
        }
        gate.add_permits(asked.len());
        for asked in asked {
            assert_eq!(asked.await.expect("no panic"), StatusCode::OK);
        }
        assert_nothing_reserved(&router).await;
    }
}
