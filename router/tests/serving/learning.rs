//! The token counts of workers are read from every kind of response.

use http::{HeaderMap, HeaderValue};
use mla_router::{RouterHandle, policy::Reason};
use tokio::time::Instant;

use crate::support::{Client, FakeWorker, Reply, Then, config, router};

const CHAT: &str = r#"{"messages":[{"role":"user","content":"hello"}],"stream":true}"#;
const WHOLE: &str = r#"{"messages":[{"role":"user","content":"hello"}]}"#;
const USAGE: &str =
    r#"{"choices":[],"usage":{"prompt_tokens":31,"prompt_tokens_details":{"cached_tokens":16}}}"#;
const META: &str = r#"{"text":"a","meta_info":{"prompt_tokens":31,"cached_tokens":16,"id":"x"}}"#;

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

fn with_headers() -> Reply {
    let mut headers = HeaderMap::new();
    headers.insert("x-mla-prompt-tokens", HeaderValue::from_static("31"));
    headers.insert("x-mla-cached-tokens", HeaderValue::from_static("16"));
    // Later counts are not used a second time.
    let events = format!("data: {USAGE}\n\ndata: [DONE]\n\n");
    Reply::Stream(headers, vec![events.into()], Then::End)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_is_found_in_every_kind_of_answer() {
    type Script = fn() -> Reply;
    let cases: [(&str, &str, Script); 6] = [
        ("/v1/chat/completions", CHAT, with_headers),
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
            let counters = &router.router().find(&worker.url().parse().expect("a URL"));
            let counters = &counters.as_ref().expect("registered").counters;
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
    let candidate = router.router().registry.workers()[0].candidate(0, Instant::now());
    assert_eq!((candidate.requests, candidate.others), (0, 11), "one of the twelve was ours");
}

/// Number of requests sent to a worker with their prefix in its cache.
fn cache_hits(router: &RouterHandle) -> u64 {
    let workers = router.router().registry.workers();
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
