//! Requests with the same new prefix: the worker gets one of them first, and the others when the prefix is computed.

use bytes::Bytes;
use http::StatusCode;
use mla_router::RouterHandle;
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::{JoinHandle, yield_now},
};

use crate::support::{
    Client, FakeWorker, Reply, assert_nothing_reserved, config, post, router, soon,
};

const EVENT: Bytes = Bytes::from_static(b"data: {\"choices\":[0]}\n\n");
const END: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// Prompts that have 300,000 bytes in common: their expected prefill on a new worker takes over a minute.
fn ask(number: usize) -> String {
    let shared = "All happy families are alike. ".repeat(10_000);
    format!(r#"{{"prompt":"{shared}{number}","stream":true}}"#)
}

/// A worker whose streams come from the test, and the senders of its streams.
async fn worker() -> (FakeWorker, UnboundedReceiver<UnboundedSender<Bytes>>) {
    let (streams, began) = unbounded_channel();
    let script = move |_: &_| {
        let (frames, source) = unbounded_channel();
        streams.send(frames).expect("the test listens");
        Reply::Events(source)
    };
    (FakeWorker::start(script).await, began)
}

/// Sends each request on its own connection. Returns when this number of requests waits in the router.
async fn ask_at_once(router: &RouterHandle, requests: usize, waiting: u64) -> Vec<JoinHandle<()>> {
    let counters = &router.router().registry.replicas()[0].counters;
    let address = router.local_addr();
    let mut asked = Vec::new();
    for number in 0..requests {
        asked.push(tokio::spawn(async move {
            let answer = Client::connect(address).await.post("/v1/completions", ask(number)).await;
            assert_eq!(answer.status, StatusCode::OK);
            assert!(answer.body.ends_with(&END), "{:?}", answer.body);
        }));
    }
    let all_wait = async {
        while counters.prefix_waits.get() < waiting {
            yield_now().await;
        }
    };
    soon(all_wait).await;
    asked
}

#[tokio::test(start_paused = true)]
async fn prefix_is_requested_once_until_its_first_byte() {
    let (mut worker, mut began) = worker().await;
    let router = router(config(), &[&worker]).await;
    let asked = ask_at_once(&router, 5, 4).await;
    let first = soon(began.recv()).await.expect("one request");
    worker.request().await;
    assert_eq!(worker.requests_so_far(), 0, "the others wait");
    first.send(EVENT).expect("the router listens");
    let mut streams = vec![first];
    for _ in 1..5 {
        streams.push(soon(began.recv()).await.expect("the others follow, before the first ends"));
    }
    for stream in streams {
        stream.send(END).expect("the router listens");
    }
    for asked in asked {
        soon(asked).await.expect("answered in full");
    }
    assert_nothing_reserved(&router).await;
}

#[tokio::test(start_paused = true)]
async fn prefill_waiters_continue_when_the_first_client_leaves() {
    let (worker, mut began) = worker().await;
    let router = router(config(), &[&worker]).await;
    let mut leaver = Client::connect(router.local_addr()).await;
    let leaving = tokio::spawn(async move { leaver.send(post("/v1/completions", ask(9))).await });
    let _unanswered = soon(began.recv()).await.expect("one request");
    let asked = ask_at_once(&router, 2, 2).await;
    leaving.abort();
    for _ in 0..2 {
        let stream = soon(began.recv()).await.expect("the next");
        stream.send(END).expect("the router listens");
    }
    for asked in asked {
        soon(asked).await.expect("answered in full");
    }
    assert_nothing_reserved(&router).await;
}

/// A prompt of 16,000 bytes, taken for 4,000 tokens, that shares nothing with others.
fn long(number: usize) -> String {
    let own = format!("{number} is like no other. ").repeat(16_000 / 23);
    format!(r#"{{"prompt":"{own}","stream":true}}"#)
}

/// Later requests may use the worker in the meantime, up to a bound.
#[tokio::test(start_paused = true)]
async fn prefill_waiter_is_not_overtaken_without_bound() {
    let (mut worker, mut began) = worker().await;
    let router = router(config(), &[&worker]).await;
    let mut asked = ask_at_once(&router, 2, 1).await;
    let first = soon(began.recv()).await.expect("one request");
    let (address, mut streams) = (router.local_addr(), Vec::new());
    let counters = &router.router().registry.replicas()[0].counters;
    for number in 0..8 {
        asked.push(tokio::spawn(async move {
            let answer = Client::connect(address).await.post("/v1/completions", long(number)).await;
            assert_eq!(answer.status, StatusCode::OK);
        }));
        while counters.selections.total() < 3 + number as u64 {
            yield_now().await;
        }
    }
    for _ in 0..3 {
        streams.push(soon(began.recv()).await.expect("a step's worth of prompts"));
    }
    for _ in 0..4 {
        worker.request().await;
    }
    assert_eq!(worker.requests_so_far(), 0, "the other five keep their places");
    assert_eq!(counters.prefix_waits.get(), 6);
    first.send(EVENT).expect("the router listens");
    for _ in 0..6 {
        streams.push(soon(began.recv()).await.expect("the one that waited, and five"));
    }
    for stream in streams.iter().chain([&first]) {
        stream.send(END).expect("the router listens");
    }
    drop((streams, first));
    for asked in asked {
        soon(asked).await.expect("answered in full");
    }
    assert_nothing_reserved(&router).await;
}

#[tokio::test(start_paused = true)]
async fn no_prefill_wait_if_the_engine_shares_prefixes_in_flight() {
    let (mut worker, mut began) = worker().await;
    worker.set_info(r#"{"boot_id":"a","in_batch_prefix_sharing":true}"#);
    let router = router(config(), &[&worker]).await;
    let asked = ask_at_once(&router, 3, 0).await;
    for _ in 0..3 {
        worker.request().await;
        soon(began.recv()).await.expect("all three at once").send(END).expect("it listens");
    }
    for asked in asked {
        soon(asked).await.expect("answered in full");
    }
    assert_nothing_reserved(&router).await;
}
