//! The token counts of workers are read from every kind of response.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use http::{HeaderMap, HeaderValue};
use mla_router::{RouterHandle, policy::Reason};
use tokio::time::Instant;

use crate::support::{
    Client, Event, FakeWorker, Reply, Then, assert_nothing_reserved, config, router, soon,
};

const CHAT: &str = r#"{"messages":[{"role":"user","content":"hello"}],"stream":true}"#;
const WHOLE: &str = r#"{"messages":[{"role":"user","content":"hello"}]}"#;
const USAGE: &str =
    r#"{"choices":[],"usage":{"prompt_tokens":31,"prompt_tokens_details":{"cached_tokens":16}}}"#;
const META: &str = r#"{"text":"a","meta_info":{"prompt_tokens":31,"cached_tokens":16,"id":"x"}}"#;

/// The largest count of 64 bits.
const IMPOSSIBLE: &str = "18446744073709551615";

fn stream(event: &'static str) -> Reply {
    let events = format!(
        "data: {{\"choices\":[],\"text\":\"\",\"usage\":null}}\n\ndata: {event}\n\ndata: [DONE]\n\n"
    );
    Reply::Stream(HeaderMap::new(), vec![events.into()], Then::End)
}

/// A stream of the Responses API.
fn named() -> Reply {
    let created = r#"{"type":"response.created","response":{"usage":null}}"#;
    let completed = r#"{"type":"response.completed","response":{"usage":{"input_tokens":31,"input_tokens_details":{"cached_tokens":16}}}}"#;
    let events = format!(
        "event: response.created\ndata: {created}\n\nevent: response.completed\ndata: {completed}\n\n"
    );
    Reply::Stream(HeaderMap::new(), vec![events.into()], Then::End)
}

fn with_headers(prompt_tokens: &'static str, cached_tokens: &'static str) -> Reply {
    let mut headers = HeaderMap::new();
    headers.insert("x-mla-prompt-tokens", HeaderValue::from_static(prompt_tokens));
    headers.insert("x-mla-cached-tokens", HeaderValue::from_static(cached_tokens));
    // Later counts are not used a second time.
    let events = format!("data: {USAGE}\n\ndata: [DONE]\n\n");
    Reply::Stream(headers, vec![events.into()], Then::End)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_is_found_in_every_kind_of_answer() {
    type Script = fn() -> Reply;
    let cases: [(&str, &str, Script); 7] = [
        ("/v1/chat/completions", CHAT, || with_headers("31", "16")),
        // Impossible counts are no counts.
        ("/v1/chat/completions", CHAT, || with_headers(IMPOSSIBLE, IMPOSSIBLE)),
        ("/v1/chat/completions", CHAT, || stream(USAGE)),
        ("/v1/chat/completions", WHOLE, || Reply::ok(USAGE)),
        ("/v1/responses", r#"{"input":"hello","stream":true}"#, named),
        ("/generate", r#"{"text":"a","stream":true}"#, || stream(META)),
        ("/generate", r#"{"text":"a"}"#, || Reply::ok(META)),
    ];
    for (path, body, script) in cases {
        let worker = FakeWorker::start(move |_| script()).await;
        let router = router(config(), &[&worker]).await;
        let mut client = Client::connect(router.local_addr()).await;
        for count in 1..=2 {
            assert_eq!(client.post(path, body).await.status, 200, "{path} {body}");
            let counters = &router.router().registry.replicas()[0].counters;
            let told = (counters.prompt_tokens.total(), counters.cached_tokens.total());
            assert_eq!(told, (31 * count, 16 * count), "{path} {body}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_of_other_routers_is_known_from_worker_reports() {
    let worker = FakeWorker::start(|_| {
        let mut headers = HeaderMap::new();
        headers.insert("x-mla-requests", HeaderValue::from_static("12"));
        Reply::Stream(headers, vec!["data: [DONE]\n\n".into()], Then::End)
    })
    .await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    assert_eq!(client.post("/v1/chat/completions", CHAT).await.status, 200);
    let candidate = router.router().registry.replicas()[0].candidate(0, Instant::now());
    assert_eq!(
        (candidate.requests, candidate.other_requests),
        (0, 11),
        "one of the twelve was ours"
    );
}

/// Number of requests sent to a worker with their prefix in its cache.
fn cache_hits(router: &RouterHandle) -> u64 {
    let workers = router.router().registry.replicas();
    workers.iter().map(|worker| worker.counters.selections.get(Reason::CacheHit)).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_does_not_match_the_cache_of_the_previous_one() {
    let (first, second) = (FakeWorker::plain().await, FakeWorker::plain().await);
    let router = router(config(), &[&first, &second]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let prompt = |word: &str| format!(r#"{{"prompt":"{}"}}"#, word.repeat(2000));
    for (word, hits) in [("one ", 0), ("one ", 1), ("two ", 1), ("one ", 2), ("six ", 2)] {
        assert_eq!(client.post("/v1/completions", prompt(word)).await.status, 200);
        assert_eq!(cache_hits(&router), hits, "{word}");
    }
}

/// Two workers of which the first request gets `reply`, and all others a good answer.
async fn first_gets(reply: fn() -> Reply) -> [FakeWorker; 2] {
    let begun = Arc::new(AtomicUsize::new(0));
    let script = || {
        let begun = Arc::clone(&begun);
        move |_: &_| match begun.fetch_add(1, Ordering::SeqCst) {
            0 => reply(),
            _ => Reply::good(),
        }
    };
    [FakeWorker::start(script()).await, FakeWorker::start(script()).await]
}

fn long() -> String {
    format!(r#"{{"prompt":"{}"}}"#, "one ".repeat(2000))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_a_worker_refuses_is_not_taken_for_cached() {
    let [first, second] = first_gets(|| Reply::status(400)).await;
    let router = router(config(), &[&first, &second]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for (status, hits) in [(400, 0), (200, 0), (200, 1)] {
        assert_eq!(client.post("/v1/completions", long()).await.status, status);
        assert_eq!(cache_hits(&router), hits);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_whose_client_left_before_its_answer_is_not_taken_for_cached() {
    let [mut first, mut second] = first_gets(|| Reply::Hang).await;
    let router = router(config(), &[&first, &second]).await;
    let address = router.local_addr();
    let leaving = tokio::spawn(async move {
        Client::connect(address).await.post("/v1/completions", long()).await;
    });
    let asked = tokio::select! {
        _seen = first.request() => &mut first,
        _seen = second.request() => &mut second,
    };
    leaving.abort();
    assert!(matches!(asked.event().await, Event::Aborted));
    // The worker may notice the abort before the router has taken the prompt back.
    soon(async {
        while router.workers().iter().any(|worker| worker.requests > 0) {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let mut client = Client::connect(address).await;
    for hits in [0, 1] {
        assert_eq!(client.post("/v1/completions", long()).await.status, 200);
        assert_eq!(cache_hits(&router), hits);
    }
    assert_nothing_reserved(&router).await;
}

/// Other answers come when all is done, and their time is that of all their tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_first_bytes_of_streams_tell_a_workers_pace() {
    let worker =
        FakeWorker::start(
            |seen| {
                if seen.body == CHAT.as_bytes() { stream(USAGE) } else { Reply::good() }
            },
        )
        .await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let workers = router.router().registry.replicas();
    for (body, told) in [(WHOLE, 0), (CHAT, 1), (WHOLE, 1)] {
        assert_eq!(client.post("/v1/chat/completions", body).await.status, 200);
        assert_eq!(workers[0].counters.first_token.count(), told, "{body}");
    }
}
