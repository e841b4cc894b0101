//! A stream whose worker dies is continued by another worker, and the client does not notice.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use mla_router::{Config, RouterHandle, engine::continuation};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::support::{
    Client, FakeWorker, Process, Reply, Seen, Then, assert_nothing_reserved, config, post, router,
    secs, soon,
};

const PATH: &str = "/v1/chat/completions";
const BODY: &str = r#"{"stream":true,"messages":[{"role":"user","content":"}"}]}"#;
const ANSWER: &str = r#"id=chatcmpl-1 seed="7" \"#;
const TOKENS: usize = 4;

/// An engine with a known token at each position, so that a continuation can be checked.
///
/// Returns the events of a request with `choices` choices after the given tokens; with `marks` also the lines for
/// the router.
fn stream(choices: usize, said: Option<&Value>, marks: bool) -> String {
    let (mut parts, mut total) = (Vec::new(), 0);
    if said.is_none() {
        let role = r#"{"id":"1","choices":[{"index":0,"delta":{"role":"assistant"}}]}"#;
        parts.push(format!("data: {role}\n\n"));
    }
    let of = |choice: usize| said.and_then(|said| said["choices"].get(choice));
    for place in 0..TOKENS {
        for choice in 0..choices {
            let id = 1000 * (choice + 1) + place;
            let ids = of(choice).map(|choice| choice["token_ids"].as_array().expect("ids"));
            total += 1;
            if let Some(said) = ids.and_then(|ids| ids.get(place)) {
                assert_eq!(said, id, "a token that this engine would not have chosen");
                continue;
            }
            let last = place + 1 == TOKENS;
            if marks {
                parts.push(format!(":mla {choice} {id}{}\n", if last { " length" } else { "" }));
            }
            let reason = if last { "\"length\"" } else { "null" };
            parts.push(format!(
                "data: {{\"id\":\"1\",\"choices\":[{{\"index\":{choice},\"delta\":{{\"content\":\
                 \"\u{fc}{id}\u{1f600}\"}},\"finish_reason\":{reason}}}]}}\n\n"
            ));
        }
    }
    let usage = format!(r#"{{"id":"1","choices":[],"usage":{{"completion_tokens":{total}}}}}"#);
    parts.push(format!("data: {usage}\n\ndata: [DONE]\n\n"));
    parts.concat()
}

/// The length of the first event.
fn first_event() -> usize {
    stream(1, None, true).find("\n\n").expect("an event") + 2
}

/// Workers of one kind: their requests and responses.
#[derive(Clone)]
pub(crate) struct Engine {
    pub path: &'static str,
    pub body: &'static str,
    pub stream: Arc<Stream>,
}

/// A complete stream after the given tokens, with or without the lines for the router.
type Stream = dyn Fn(Option<&Value>, bool) -> String + Send + Sync;

fn chat(choices: usize) -> Engine {
    let stream = Arc::new(move |said: Option<&Value>, marks| stream(choices, said, marks));
    Engine { path: PATH, body: BODY, stream }
}

fn continuation(seen: &Seen) -> Option<Value> {
    continuation_of(seen, BODY)
}

/// Returns the field `continuation` of a request. All other fields must equal those of the client.
fn continuation_of(seen: &Seen, body: &str) -> Option<Value> {
    assert_eq!(seen.head.headers["x-mla-replay"], "1");
    let mut sent: Value = serde_json::from_slice(&seen.body).expect("JSON");
    let continuation = sent.as_object_mut().expect("an object").remove("continuation");
    assert_eq!(sent, serde_json::from_str::<Value>(body).expect("JSON"));
    let signature = seen.head.headers.get("x-mla-signature");
    if let Some(continuation) = &continuation {
        assert_eq!(continuation["response"], ANSWER);
        let key = config().replay_key.expect("that of tests");
        let target = seen.head.uri.path_and_query().expect("a target").as_str();
        assert_eq!(signature, Some(&continuation::sign(&key, target, &seen.body)));
    } else {
        assert_eq!(signature, None);
    }
    continuation
}

fn answer() -> HeaderMap {
    let value = HeaderValue::from_static(ANSWER);
    [("x-mla-replay".parse().expect("a name"), value)].into_iter().collect()
}

/// Bytes after which the next streams break, in order. Later streams do not break.
type Cuts = Arc<Mutex<Vec<(usize, Then)>>>;

async fn worker(engine: &Engine, cuts: &Cuts, requests: &Arc<AtomicUsize>) -> FakeWorker {
    let (engine, cuts, requests) = (engine.clone(), Arc::clone(cuts), Arc::clone(requests));
    FakeWorker::start(move |seen| {
        requests.fetch_add(1, Ordering::Relaxed);
        let said = continuation_of(seen, engine.body);
        let stream = (engine.stream)(said.as_ref(), true);
        let (length, then) = cuts.lock().pop().unwrap_or((stream.len(), Then::End));
        let bytes = &stream.as_bytes()[..length.min(stream.len())];
        let frames = bytes.chunks(50).map(Bytes::copy_from_slice).collect();
        Reply::Stream(answer(), frames, then)
    })
    .await
}

/// A router in front of workers with this engine.
pub(crate) struct Fleet {
    engine: Engine,
    cuts: Cuts,
    requests: Arc<AtomicUsize>,
    workers: Vec<FakeWorker>,
    pub router: RouterHandle,
    client: Client,
}

impl Fleet {
    pub(crate) async fn new(config: Config, engine: Engine) -> Self {
        let (cuts, requests) = (Cuts::default(), Arc::default());
        let mut workers = Vec::new();
        for _ in 0..4 {
            workers.push(worker(&engine, &cuts, &requests).await);
        }
        let router = router(config, &workers.iter().collect::<Vec<_>>()).await;
        let client = Client::connect(router.local_addr()).await;
        Self { engine, cuts, requests, workers, router, client }
    }

    /// Returns the client's stream if the streams of the workers break like this.
    pub(crate) async fn ask(&mut self, cuts: &[(usize, Then)]) -> String {
        *self.cuts.lock() = cuts.iter().rev().copied().collect();
        self.requests.store(0, Ordering::Relaxed);
        let answer = self.client.post(self.engine.path, self.engine.body).await;
        assert_eq!(answer.status, StatusCode::OK, "{:?}", answer.body);
        assert!(!answer.headers.contains_key("x-mla-replay"));
        String::from_utf8(answer.body.to_vec()).expect("UTF-8")
    }

    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns the client's stream without a break.
    pub(crate) fn whole(&self) -> String {
        (self.engine.stream)(None, false)
    }

    pub(crate) fn replays(&self, outcome: &str) -> String {
        let page = mla_router::admin::metrics::render(self.router.router());
        let series = format!("mla_router_replays_total{{outcome=\"{outcome}\"}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&series));
        line.expect("a series").to_owned()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_cut_at_any_byte_is_continued() {
    for choices in [1, 2] {
        // All streams of a worker fail, so the breakers would take out all workers.
        let config = Config { cb_failure_threshold: 10_000, ..config() };
        let mut fleet = Fleet::new(config, chat(choices)).await;
        let whole = fleet.whole();
        assert_eq!(fleet.ask(&[]).await, whole);
        let sent = stream(choices, None, true).len();
        for cut in 1..sent {
            let then = if cut % 2 == 0 { Then::Break } else { Then::End };
            assert_eq!(fleet.ask(&[(cut, then)]).await, whole, "cut at {cut} of {sent}");
            // A stream that ends after the counts lacks only `[DONE]`.
            let requests = if cut < sent - "data: [DONE]\n\n".len() { 2 } else { 1 };
            assert_eq!(fleet.requests(), requests, "cut at {cut} of {sent}");
        }
        assert_nothing_reserved(&fleet.router).await;
        let begun = first_event() - 1;
        assert_eq!(fleet.router.router().metrics.retries.total(), begun as u64);
        assert_eq!(fleet.replays("continued"), (sent - 15 - begun).to_string());
        assert_eq!(fleet.router.router().metrics.first_byte.count(), sent as u64, "one a client");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_after_the_last_event_needs_no_continuation() {
    let mut fleet = Fleet::new(config(), chat(1)).await;
    for then in [Then::Break, Then::Silence] {
        assert_eq!(fleet.ask(&[(usize::MAX, then)]).await, fleet.whole());
        assert_eq!(fleet.requests(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_is_continued_three_times() {
    let mut fleet = Fleet::new(config(), chat(2)).await;
    let whole = fleet.whole();
    let seed = fastrand::u64(..);
    let mut rng = fastrand::Rng::with_seed(seed);
    for _ in 0..200 {
        // Each stream has at least one event: two without events look like a fault of the request.
        let cuts = [200, 150, 150].map(|least| (rng.usize(least..300), Then::Break));
        assert_eq!(fleet.ask(&cuts).await, whole, "{cuts:?}, seed {seed}");
    }
    let cuts = [(200, Then::Break); 4];
    let got = fleet.ask(&cuts).await;
    assert!(got.contains("\"code\":\"stream_broken\"") && !got.contains("[DONE]"), "{got}");
    assert_eq!(fleet.requests(), 4);
    assert_eq!(fleet.replays("given_up"), "1");
    assert_nothing_reserved(&fleet.router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_that_breaks_every_worker_fails() {
    let mut fleet = Fleet::new(config(), chat(1)).await;
    let cuts = [(first_event(), Then::Break), (10, Then::Break), (10, Then::Break)];
    let got = fleet.ask(&cuts).await;
    let code = "\"code\":\"stream_not_continued\"";
    assert!(got.contains(code) && !got.contains("[DONE]"), "{got}");
    assert_eq!(fleet.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn late_tokens_of_a_frozen_worker_are_dropped() {
    let config = Config {
        inter_token_timeout_secs: secs(0.05),
        cb_timeout_duration_secs: secs(0.01),
        ..config()
    };
    let mut fleet = Fleet::new(config, chat(2)).await;
    let sent = stream(2, None, true).len();
    for cut in [first_event(), 100, sent / 2, sent - 20] {
        let whole = fleet.whole();
        assert_eq!(fleet.ask(&[(cut, Then::Silence)]).await, whole, "frozen at {cut}");
        assert_eq!(fleet.requests(), 2);
    }
    // The router has dropped the frozen requests.
    let mut aborted = 0;
    soon(async {
        while aborted < 4 {
            aborted += fleet.workers.iter_mut().map(FakeWorker::aborts_so_far).sum::<usize>();
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// With the default settings. HTTP works, and the health check reports that the engine is stuck.
#[tokio::test(start_paused = true)]
async fn stream_of_a_stuck_engine_continues_elsewhere_within_2500_ms() {
    let Config { allowed_hosts, replay_key, .. } = config();
    let config = Config { allowed_hosts, replay_key, ..Config::default() };
    let mut fleet = Fleet::new(config, chat(1)).await;
    let whole = fleet.whole();
    let Fleet { engine, cuts, workers, router, client, .. } = &mut fleet;
    cuts.lock().push((stream(1, None, true).len() / 2, Then::Silence));
    let asked = async {
        let answer = client.post(engine.path, engine.body).await;
        (answer, Instant::now())
    };
    let stuck = async {
        let busy = || router.workers().iter().position(|worker| worker.requests > 0);
        while busy().is_none() {
            sleep(Duration::from_millis(10)).await;
        }
        sleep(Duration::from_millis(100)).await;
        let number = busy().expect("it streams");
        workers[number].report(503, r#"{"status":"stuck"}"#);
        Instant::now()
    };
    let ((answer, ended), began) = tokio::join!(asked, stuck);
    assert_eq!(answer.body, whole);
    let gap = (ended - began).as_secs_f64();
    assert!(gap <= 2.5, "{gap} s");
}

/// The only stream of its worker, whose health check says that its engine makes progress.
#[tokio::test(start_paused = true)]
async fn a_stream_that_an_engine_has_lost_goes_on_elsewhere_within_a_minute() {
    let Config { allowed_hosts, replay_key, .. } = config();
    let config = Config { allowed_hosts, replay_key, ..Config::default() };
    let mut fleet = Fleet::new(config, chat(1)).await;
    for worker in &fleet.workers {
        worker.report(200, r#"{"status":"ok","last_step_age":0.1}"#);
    }
    sleep(Duration::from_secs(2)).await;
    let (whole, begun) = (fleet.whole(), Instant::now());
    let cut = stream(1, None, true).len() / 2;
    let got = fleet.ask(&[(cut, Then::Silence)]).await;
    assert_eq!(got.replace(": ping\n\n", ""), whole);
    let took = begun.elapsed().as_secs();
    assert!((45..=60).contains(&took), "{took} s");
    assert_eq!(fleet.requests(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_of_a_draining_worker_continues_elsewhere() {
    for code in ["scheduler_ended", "draining", "engine_died"] {
        let error = format!("data: {{\"error\":{{\"message\":\"\",\"code\":\"{code}\"}}}}\n\n");
        let begun = AtomicUsize::new(0);
        let script = Arc::new(move |seen: &Seen| {
            let whole = stream(1, continuation(seen).as_ref(), true);
            let frames = if begun.fetch_add(1, Ordering::Relaxed) == 0 {
                let (cut, _) = whole.match_indices("\n\n").nth(2).expect("three events");
                vec![Bytes::from(whole[..cut + 2].to_owned()), Bytes::from(error.clone())]
            } else {
                vec![Bytes::from(whole)]
            };
            Reply::Stream(answer(), frames, Then::End)
        });
        let mut workers = Vec::new();
        for _ in 0..2 {
            let script = Arc::clone(&script);
            workers.push(FakeWorker::start(move |seen| script(seen)).await);
        }
        let router = router(config(), &workers.iter().collect::<Vec<_>>()).await;
        let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
        assert_eq!(answer.body, stream(1, None, false), "{code}");
    }
}

/// The first request gets a stream that breaks after two tokens, the others the reply `second`.
async fn broken_and_then(second: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> String {
    let begun = AtomicUsize::new(0);
    let script = Arc::new(move |seen: &Seen| {
        if begun.fetch_add(1, Ordering::Relaxed) > 0 {
            return second(seen);
        }
        let whole = stream(1, None, true);
        let (cut, _) = whole.match_indices("\n\n").nth(2).expect("three events");
        Reply::Stream(answer(), vec![Bytes::from(whole[..cut + 2].to_owned())], Then::Break)
    });
    let mut workers = Vec::new();
    for _ in 0..2 {
        let script = Arc::clone(&script);
        workers.push(FakeWorker::start(move |seen| script(seen)).await);
    }
    let router = router(config(), &workers.iter().collect::<Vec<_>>()).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
    assert_nothing_reserved(&router).await;
    let got = String::from_utf8(answer.body.to_vec()).expect("UTF-8");
    let whole = stream(1, None, false);
    let (kept, _) = whole.match_indices("\n\n").nth(2).expect("three events");
    got.strip_prefix(&whole[..kept + 2]).expect("what came before the break").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_continuation_ends_the_stream_with_an_error() {
    let refused = broken_and_then(|_| Reply::status(400)).await;
    assert!(refused.contains("\"code\":\"stream_not_continued\"") && refused.contains("400"));
    let whole = || vec![Bytes::from(stream(1, None, false))];
    let another =
        broken_and_then(move |_| Reply::Stream(HeaderMap::new(), whole(), Then::End)).await;
    assert!(another.contains("\"code\":\"stream_not_continued\""), "{another}");
    let json = broken_and_then(|_| Reply::ok("{\"choices\":[]}")).await;
    assert!(json.contains("\"code\":\"stream_not_continued\""), "{json}");
    for rest in [refused, another, json] {
        assert!(!rest.contains("[DONE]") && rest.matches("data:").count() == 1, "{rest}");
    }
}

/// An event that is too long to be held is passed on in parts, and a part cannot be taken back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_breaks_in_an_event_of_which_the_client_has_a_part_is_cut_off() {
    let requests = Arc::new(AtomicUsize::new(0));
    let mut workers = Vec::new();
    for _ in 0..2 {
        let requests = Arc::clone(&requests);
        let script = move |_: &Seen| {
            requests.fetch_add(1, Ordering::Relaxed);
            let long = "x".repeat(100 << 10);
            let part = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{long}");
            let first = stream(1, None, true)[..first_event()].to_owned();
            Reply::Stream(answer(), vec![Bytes::from(first), Bytes::from(part)], Then::Break)
        };
        workers.push(FakeWorker::start(script).await);
    }
    let router = router(config(), &workers.iter().collect::<Vec<_>>()).await;
    let got = Client::connect(router.local_addr()).await.call(post(PATH, BODY)).await;
    assert!(got.is_err(), "a whole response");
    assert_eq!(requests.load(Ordering::Relaxed), 1);
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inconsistent_token_count_prevents_continuation() {
    let worker = FakeWorker::start(|_| {
        let events = ":mla 0 1\ndata: {\"choices\":[]}\n\n:mla 0 x\ndata: {}\n\n";
        Reply::Stream(answer(), vec![Bytes::from_static(events.as_bytes())], Then::Break)
    })
    .await;
    let router = router(config(), &[&worker]).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
    let got = String::from_utf8(answer.body.to_vec()).expect("UTF-8");
    assert!(got.starts_with("data: {\"choices\":[]}\n\ndata: {}\n\ndata: {\"error\""), "{got}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn continuation_data_is_requested_only_where_supported() {
    let mut worker = FakeWorker::plain().await;
    let off = Config { disable_replay: true, ..config() };
    let without_key = Config { replay_key: None, ..config() };
    for (config, path, body, asked) in [
        (config(), PATH, BODY, true),
        (config(), "/v1/completions", r#"{"prompt":"a","stream":true} "#, true),
        (config(), "/generate", r#"{"input_ids":[1],"stream":true}"#, true),
        (config(), "/v1/responses", r#"{"input":"a","stream":true}"#, true),
        (config(), PATH, r#"{"messages":[{"role":"user","content":"}"}]}"#, false),
        (config(), "/generate", r#"{"text":"a","stream":false}"#, false),
        (config(), "/v1/embeddings", r#"{"input":"a","stream":true}"#, false),
        (config(), "/generate", r#"["stream"]"#, false),
        (off, PATH, BODY, false),
        (without_key, PATH, BODY, false),
    ] {
        let router = router(config, &[&worker]).await;
        let mut request = post(path, body);
        request.headers_mut().insert("x-mla-replay", HeaderValue::from_static("1"));
        Client::connect(router.local_addr()).await.call(request).await.expect("a response");
        let seen = worker.request().await;
        assert_eq!(seen.head.headers.contains_key("x-mla-replay"), asked, "{path} {body}");
    }
}

/// A forged continuation could set the id, the counts and the text of an answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_cannot_send_a_continuation() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for field in [
        r#""continuation":{"response":"1.AAAA","choices":[]}"#,
        r#""contin\u0075ation":{"response":"1.AAAA","choices":[]}"#,
    ] {
        for stream in [true, false] {
            let body = format!(r#"{{{field},"stream":{stream},"prompt":"a"}}"#);
            let answer = client.post("/v1/completions", body).await;
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{field}");
            assert_eq!(answer.json()["error"]["param"], "continuation");
        }
    }
    assert_eq!(worker.requests_so_far(), 0);
    let mut request = post("/v1/completions", r#"{"prompt":"\"continuation\":1"}"#);
    request.headers_mut().insert("x-mla-signature", HeaderValue::from_static("00"));
    assert_eq!(client.call(request).await.expect("a response").status, StatusCode::OK);
    assert!(!worker.request().await.head.headers.contains_key("x-mla-signature"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_line_reports_stream_continuation() {
    for (variables, told) in [(&[][..], true), (&[("MLA_ROUTER_REPLAY_KEY", "k")], false)] {
        let mut process = Process::start_with(&["--port", "0"], variables);
        let line = process.line_with("listening on").await;
        assert_eq!(line.contains("MLA_ROUTER_REPLAY_KEY"), told, "{line}");
    }
}
