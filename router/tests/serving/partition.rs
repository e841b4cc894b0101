//! A network partition between the router and a worker: no reset, no end, and the worker continues. After the repair,
//! stale bytes arrive.

use std::time::Duration;

use http::StatusCode;
use http_body_util::BodyExt;
use mla_mock_worker::{MockWorker, Settings};
use mla_router::{Config, RouterHandle, fleet::Phase, metrics::ReplayOutcome};
use serde_json::Value;
use tokio::{sync::mpsc, task::JoinSet, time::sleep};

use crate::{
    kills::{requests, said},
    support::{
        Cable, Client, all_in, assert_nothing_reserved, config, post, router_without_waiting, secs,
        soon,
    },
};

/// Slow enough that all streams are open at the same time.
fn settings() -> Settings {
    Settings { decode_base_ms: 20.0, decode_per_request_ms: 0.0, ..Settings::default() }
}

fn hasty() -> Config {
    Config {
        health_check_timeout_secs: secs(0.2),
        inter_token_timeout_secs: secs(0.3),
        cb_timeout_duration_secs: secs(0.01),
        ..config()
    }
}

/// Returns the text of all streams. Runs `meanwhile` when each of them has started.
async fn ask_all(router: &RouterHandle, meanwhile: impl FnOnce()) -> Vec<Value> {
    let mut asked = JoinSet::new();
    let (told, mut begun) = mpsc::unbounded_channel();
    let requests = requests();
    let count = requests.len();
    for (number, (path, body)) in requests.into_iter().enumerate() {
        let (address, told) = (router.local_addr(), told.clone());
        asked.spawn(async move {
            let mut client = Client::connect(address).await;
            let response = client.send(post(path, body.to_string())).await.expect("a head");
            assert_eq!(response.status(), StatusCode::OK);
            told.send(()).expect("somebody waits for it");
            let body = response.into_body().collect().await.expect("a whole response").to_bytes();
            (number, said(std::str::from_utf8(&body).expect("UTF-8")))
        });
    }
    for _ in 0..count {
        soon(begun.recv()).await;
    }
    meanwhile();
    let mut all = soon(asked.join_all()).await;
    all.sort_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, said)| said).collect()
}

#[tokio::test(start_paused = true)]
async fn streams_continue_after_a_partition_and_late_data_is_ignored() {
    let (mut workers, mut cables) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let worker = MockWorker::start(settings()).await.expect("a free port");
        cables.push(Cable::to(worker.address()).await);
        workers.push(worker);
    }
    let worker_urls = cables.iter().map(|cable| cable.url().parse().expect("a URL")).collect();
    let router = router_without_waiting(Config { worker_urls, ..hasty() }, &[]).await;
    all_in(Phase::Healthy, &router).await;
    let expected = ask_all(&router, || {}).await;

    let mut cut = 0;
    let got = ask_all(&router, || {
        let views = router.workers();
        cut = usize::from(views[1].requests > views[0].requests);
        assert!(views[cut].requests > 0, "{views:?}");
        cables[cut].pull();
    })
    .await;
    assert_eq!(got, expected);
    let continued = router.router().metrics.replays.get(ReplayOutcome::Continued);
    assert!(continued > 0, "no stream was on the worker that was cut off");
    assert_ne!(router.workers()[cut].phase, Phase::Healthy);
    let served = workers[cut].stats().totals.requests;
    assert_eq!(ask_all(&router, || {}).await, expected, "while it is away");
    assert_eq!(workers[cut].stats().totals.requests, served);

    cables[cut].plug();
    all_in(Phase::Healthy, &router).await;
    assert_eq!(ask_all(&router, || {}).await, expected);
    assert!(workers[cut].stats().totals.requests > served, "it has its share again");
    // The worker ends the requests that it has continued in vain.
    soon(async {
        while workers.iter().any(|worker| worker.stats().running + worker.stats().waiting > 0) {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    assert_nothing_reserved(&router).await;
}
