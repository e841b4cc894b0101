//! Workers are killed repeatedly under streams, and no client notices.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::StatusCode;
use http_body_util::BodyExt;
use mla_mock_worker::{Fault, Kind, MockWorker, Settings};
use mla_router::{Config, RouterHandle, fleet::Phase};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::support::{
    Client, all_in, assert_nothing_reserved, config, post, router_without_waiting, secs, soon,
};

const STREAMS: usize = 16;
const KILLS: usize = 50;

fn settings() -> Settings {
    Settings { decode_base_ms: 2.0, decode_per_request_ms: 0.0, ..Settings::default() }
}

/// Streamed requests of every kind that can be continued.
pub(crate) fn requests() -> Vec<(&'static str, Value)> {
    let usage = json!({"include_usage": true});
    (0..STREAMS)
        .map(|number| {
            let text = format!("Stream number {number} says ").repeat(10);
            match number % 4 {
                0 => (
                    "/v1/chat/completions",
                    json!({"model": "mock", "messages": [{"role": "user", "content": text}],
                           "max_tokens": 40, "stream": true, "stream_options": usage}),
                ),
                1 => (
                    "/v1/completions",
                    json!({"model": "mock", "prompt": text, "seed": number,
                           "max_tokens": 40, "stream": true, "stream_options": usage}),
                ),
                2 => (
                    "/v1/completions",
                    json!({"model": "mock", "prompt": [text, "another one"],
                           "max_tokens": 40, "stream": true, "stream_options": usage}),
                ),
                _ => (
                    "/generate",
                    json!({"text": text, "stream": true,
                           "sampling_params": {"max_new_tokens": 40}}),
                ),
            }
        })
        .collect()
}

/// The content of a stream: text of each choice, counts and ends. Without times, cached tokens, and the split into
/// events, which differ from run to run.
pub(crate) fn said(stream: &str) -> Value {
    let whole = stream.strip_suffix("data: [DONE]\n\n");
    let mut choices: HashMap<u64, (String, Vec<Value>)> = HashMap::new();
    let (mut ids, mut usages) = (Vec::new(), Vec::new());
    for event in whole.unwrap_or_else(|| panic!("no end: {stream}")).split_terminator("\n\n") {
        let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event}"));
        let event: Value = serde_json::from_str(data).expect("JSON");
        let id = event.get("id").unwrap_or(&event["meta_info"]["id"]).clone();
        if !ids.contains(&id) {
            ids.push(id);
        }
        if let Some(text) = event.get("text") {
            let meta = &event["meta_info"];
            let choice = choices.entry(0).or_default();
            text.as_str().expect("text").clone_into(&mut choice.0);
            choice.1 = vec![
                event["output_ids"].clone(),
                meta["finish_reason"].clone(),
                meta["prompt_tokens"].clone(),
                meta["completion_tokens"].clone(),
            ];
            continue;
        }
        for part in event["choices"].as_array().expect("choices") {
            let choice = choices.entry(part["index"].as_u64().expect("an index")).or_default();
            let text = part.get("text").unwrap_or(&part["delta"]["content"]);
            choice.0 += text.as_str().unwrap_or_default();
            choice.1.extend(part.get("finish_reason").filter(|reason| !reason.is_null()).cloned());
        }
        if let Some(usage) = event.get("usage").filter(|usage| !usage.is_null()) {
            usages.push(json!([usage["prompt_tokens"], usage["completion_tokens"]]));
        }
    }
    assert_eq!(ids.len(), 1, "one answer with several ids: {ids:?}");
    let mut choices: Vec<_> = choices.into_iter().collect();
    choices.sort_by_key(|(index, _)| *index);
    json!([choices, usages])
}

async fn ask(client: &mut Client, (path, body): &(&'static str, Value)) -> Value {
    let answer = soon(client.post(path, body.to_string())).await;
    assert_eq!(answer.status, StatusCode::OK, "{:?}", answer.body);
    said(std::str::from_utf8(&answer.body).expect("UTF-8"))
}

async fn fleet(config: Config, count: usize) -> (RouterHandle, Vec<MockWorker>) {
    let mut workers = Vec::new();
    for _ in 0..count {
        workers.push(MockWorker::start(settings()).await.expect("a free port"));
    }
    let urls = workers.iter().map(|worker| worker.url().parse().expect("a valid URL")).collect();
    let router = router_without_waiting(Config { worker_urls: urls, ..config }, &[]).await;
    all_in(Phase::Healthy, &router).await;
    (router, workers)
}

fn continued(router: &RouterHandle) -> u64 {
    let metrics = &router.router().metrics;
    metrics.replays.get(mla_router::metrics::ReplayOutcome::Continued)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_kills_under_sixteen_streams_are_invisible_to_clients() {
    let (router, mut workers) = fleet(config(), 3).await;
    let mut expected = Vec::new();
    let mut client = Client::connect(router.local_addr()).await;
    for request in requests() {
        expected.push(ask(&mut client, &request).await);
    }
    let stopping = Arc::new(AtomicUsize::new(0));
    let finished = Arc::new((Mutex::new([0_usize; STREAMS]), Notify::new()));
    let mut clients = JoinSet::new();
    for (number, (request, expected)) in requests().into_iter().zip(expected).enumerate() {
        let (stopping, finished) = (Arc::clone(&stopping), Arc::clone(&finished));
        let address = router.local_addr();
        clients.spawn(async move {
            let mut client = Client::connect(address).await;
            while stopping.load(Ordering::Relaxed) == 0 {
                assert_eq!(ask(&mut client, &request).await, expected, "{request:?}");
                finished.0.lock()[number] += 1;
                finished.1.notify_one();
            }
        });
    }
    let seed = fastrand::u64(..);
    let mut rng = fastrand::Rng::with_seed(seed);
    for kill in 0..KILLS {
        sleep(Duration::from_millis(rng.u64(..40))).await;
        let victim = rng.usize(..workers.len());
        let port = workers.swap_remove(victim).kill().await;
        workers.push(MockWorker::listen(port, settings()).await.expect("its port"));
        // All workers are back and all streams have ended: no request meets many kills.
        all_in(Phase::Healthy, &router).await;
        let before = *finished.0.lock();
        soon(async {
            while finished.0.lock().iter().zip(before).any(|(now, before)| *now <= before) {
                tokio::select! {
                    () = finished.1.notified() => {}
                    // A failed client reports its error.
                    Some(ended) = clients.join_next() => {
                        panic!("kill {kill}, seed {seed}: {ended:?}");
                    }
                }
            }
        })
        .await;
    }
    stopping.store(1, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    assert!(continued(&router) > KILLS as u64, "{}, seed {seed}", continued(&router));
    assert_nothing_reserved(&router).await;
}

#[tokio::test(start_paused = true)]
async fn every_kind_of_worker_loss_in_a_stream_is_invisible_to_clients() {
    let config = Config {
        inter_token_timeout_secs: secs(0.3),
        cb_timeout_duration_secs: secs(0.01),
        ..config()
    };
    let (router, workers) = fleet(config, 2).await;
    let mut client = Client::connect(router.local_addr()).await;
    for request in requests().into_iter().take(4) {
        let expected = ask(&mut client, &request).await;
        for after_tokens in [1, 20] {
            for kind in [
                Kind::Break { after_tokens },
                Kind::Freeze { after_tokens },
                Kind::EngineDied { after_tokens },
                Kind::BadChunking { after_tokens },
            ] {
                all_in(Phase::Healthy, &router).await;
                let before = continued(&router);
                // The worker that continues fails as well, once.
                for worker in &workers {
                    worker.fault(Fault { kind: kind.clone(), count: Some(1) });
                }
                assert_eq!(ask(&mut client, &request).await, expected, "{kind:?} {request:?}");
                assert!(continued(&router) > before, "{kind:?} {request:?}");
                for worker in &workers {
                    worker.fault(Kind::None);
                }
            }
        }
    }
}

/// The waits for its first worker and for the one that continues it are together longer than
/// --queue-timeout-secs.
#[tokio::test(start_paused = true)]
async fn a_stream_that_broke_waits_anew_for_a_worker() {
    const WAIT: Duration = Duration::from_secs(8);
    let request = requests().swap_remove(0);
    let (whole, _workers) = fleet(config(), 1).await;
    let expected = ask(&mut Client::connect(whole.local_addr()).await, &request).await;
    let config = Config { queue_timeout_secs: secs(10.0), ..config() };
    let router = router_without_waiting(config, &[]).await;
    let address = router.local_addr();
    let asked =
        tokio::spawn(async move { ask(&mut Client::connect(address).await, &request).await });
    sleep(WAIT).await;
    let worker = MockWorker::start(settings()).await.expect("a free port");
    router.add_worker(&worker.url()).expect("new");
    soon(async {
        while router.router().metrics.first_byte.count() == 0 {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    let port = worker.kill().await;
    sleep(WAIT).await;
    let _worker = MockWorker::listen(port, settings()).await.expect("its port");
    assert_eq!(asked.await.expect("a whole answer"), expected);
    assert_eq!(continued(&router), 1);
    assert_nothing_reserved(&router).await;
}

/// The longest pause of a client's stream, and its text.
async fn longest_pause(client: &mut Client, (path, body): &(&'static str, Value)) -> (f64, Value) {
    let answer = client.send(post(path, body.to_string())).await.expect("a head");
    let (mut body, mut bytes) = (answer.into_body(), Vec::new());
    let (mut longest, mut last) = (Duration::ZERO, Instant::now());
    while let Some(frame) = soon(body.frame()).await {
        bytes.extend(frame.expect("a whole body").into_data().expect("data"));
        longest = longest.max(last.elapsed());
        last = Instant::now();
    }
    (longest.as_secs_f64(), said(std::str::from_utf8(&bytes).expect("UTF-8")))
}

/// With the settings that users have. The workers' engines go on: /health_generate is answered.
#[tokio::test(start_paused = true)]
async fn a_stream_that_freezes_alone_goes_on_elsewhere_within_two_seconds_and_a_half() {
    let Config { allowed_hosts, replay_key, .. } = config();
    let config = Config { allowed_hosts, replay_key, ..Config::default() };
    let (router, workers) = fleet(config, 2).await;
    let mut client = Client::connect(router.local_addr()).await;
    let request = requests().swap_remove(0);
    let expected = ask(&mut client, &request).await;
    for worker in &workers {
        worker.fault(Fault { kind: Kind::Freeze { after_tokens: 18 }, count: Some(1) });
    }
    let (pause, said) = longest_pause(&mut client, &request).await;
    assert_eq!(said, expected);
    assert!((1.9..=2.5).contains(&pause), "{pause} s");
    assert!(continued(&router) >= 1);
    all_in(Phase::Healthy, &router).await;
    assert_nothing_reserved(&router).await;
}
