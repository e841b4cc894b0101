//! The mock engine over real sockets: its answers, its streams, and each fault.

use std::{io, time::Duration};

use mla_mock_worker::{
    Garbage, Kind, MockWorker, Settings,
    client::{Client, Head, post},
    settings::Flavour,
};
use serde_json::{Value, json};
use tokio::time::timeout;

const CHAT: &str = "/v1/chat/completions";

/// Far more than anything here takes.
async fn soon<T>(awaited: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(30), awaited).await.expect("it did not happen")
}

async fn instant() -> MockWorker {
    MockWorker::start(Settings::instant()).await.expect("a free port")
}

fn chat(tokens: usize, stream: bool) -> Value {
    json!({"model": "mock", "messages": [{"role": "user", "content": "x".repeat(200)}],
           "max_tokens": tokens, "stream": stream, "stream_options": {"include_usage": true}})
}

async fn call(worker: &MockWorker, path: &str, body: &Value) -> io::Result<(Head, String)> {
    call_with(worker, path, "", body).await
}

async fn call_with(
    worker: &MockWorker,
    path: &str,
    fields: &str,
    body: &Value,
) -> io::Result<(Head, String)> {
    soon(async {
        let mut client = Client::connect(worker.address()).await?;
        client.send(&post(path, fields, &body.to_string())).await?;
        let (head, body) = client.response().await?;
        Ok((head, String::from_utf8(body).expect("text")))
    })
    .await
}

fn parse(body: &str) -> Value {
    serde_json::from_str(body).expect("JSON")
}

/// The JSON of all events but `[DONE]`.
fn events(stream: &str) -> Vec<Value> {
    let lines = stream.lines().filter_map(|line| line.strip_prefix("data: "));
    lines.filter(|data| *data != "[DONE]").map(parse).collect()
}

fn text(events: &[Value]) -> String {
    let deltas = events.iter().map(|event| &event["choices"][0]["delta"]["content"]);
    deltas.filter_map(Value::as_str).collect()
}

#[tokio::test]
async fn stream_and_complete_answer_are_equal_on_every_worker() {
    let (one, two) = (instant().await, instant().await);
    let (head, whole) = call(&one, CHAT, &chat(20, false)).await.expect("an answer");
    assert_eq!(head.field("x-mla-cached-tokens"), Some("0"));
    let whole = parse(&whole);
    let (head, stream) = call(&two, CHAT, &chat(20, true)).await.expect("an answer");
    assert_eq!(head.field("content-type"), Some("text/event-stream; charset=utf-8"));
    assert!(stream.ends_with("data: [DONE]\n\n"));
    let events = events(&stream);
    assert_eq!(whole["choices"][0]["message"]["content"], text(&events));
    assert_eq!(events.last().expect("usage")["usage"], whole["usage"]);
    assert_eq!(whole["usage"]["completion_tokens"], 20);
}

#[tokio::test]
async fn repeated_prompt_is_cached_until_a_flush() {
    let worker = instant().await;
    for expected in ["0", "48", "48"] {
        let (head, _) = call(&worker, CHAT, &chat(2, false)).await.expect("an answer");
        assert_eq!(head.field("x-mla-cached-tokens"), Some(expected));
    }
    call(&worker, "/flush_cache", &json!({})).await.expect("an answer");
    let (head, _) = call(&worker, CHAT, &chat(2, true)).await.expect("an answer");
    assert_eq!(head.field("x-mla-cached-tokens"), Some("0"));
    assert_eq!(worker.stats().totals.cached_tokens, 96);
}

#[tokio::test]
async fn another_worker_continues_a_broken_stream() {
    let (one, two) = (instant().await, instant().await);
    let replay = "x-mla-replay: 1\r\n";
    let (_, unbroken) = call(&one, CHAT, &chat(20, true)).await.expect("an answer");
    one.fault(Kind::Break { after_tokens: 7 });
    let mut client = Client::connect(one.address()).await.expect("listening");
    client.send(&post(CHAT, replay, &chat(20, true).to_string())).await.expect("sent");
    let head = soon(client.head()).await.expect("a head");
    let opaque = head.field("x-mla-replay").expect("it can be continued").to_owned();
    let mut broken = Vec::new();
    let error = soon(async {
        loop {
            if let Err(error) = client.more(&mut broken).await {
                break error;
            }
        }
    });
    assert_eq!(error.await.kind(), io::ErrorKind::UnexpectedEof);
    let broken = String::from_utf8(broken).expect("text");
    let comments = broken.lines().filter_map(|line| line.strip_prefix(":mla 0 "));
    let ids: Vec<u32> = comments.map(|ids| ids.parse().expect("one id, no finish")).collect();
    assert_eq!(ids.len(), 7);

    let mut body = chat(20, true);
    body["continuation"] =
        json!({"response": opaque, "choices": [{"token_ids": ids, "finish_reason": null}]});
    let (_, rest) = call_with(&two, CHAT, replay, &body).await.expect("an answer");
    assert!(!rest.contains("\"role\""), "the client has it already: {rest}");
    let (begun, rest) = (events(&broken), events(&rest));
    assert_eq!(begun[0]["id"], rest[0]["id"]);
    assert_eq!(begun[0]["created"], rest[0]["created"]);
    let unbroken = events(&unbroken);
    assert_eq!(text(&begun) + &text(&rest), text(&unbroken));
    assert_eq!(
        rest.last().expect("usage")["usage"]["completion_tokens"],
        unbroken.last().expect("usage")["usage"]["completion_tokens"]
    );
}

#[tokio::test]
async fn prompts_of_a_batch_have_an_answer_each() {
    let worker = instant().await;
    let body = json!({"prompt": ["abcdefgh", [1, 2, 3]], "max_tokens": 3});
    let (head, _) = call(&worker, "/v1/completions", &body).await.expect("an answer");
    assert_eq!(head.status, 400, "text and ids do not mix");
    let body = json!({"text": ["abcdefgh", "ijkl"], "sampling_params": {"max_new_tokens": 3}});
    let (_, answer) = call(&worker, "/generate", &body).await.expect("an answer");
    assert_eq!(parse(&answer).as_array().map(Vec::len), Some(2));
}

#[tokio::test]
async fn other_engines_have_no_own_headers() {
    for (flavour, has_info) in [(Flavour::Sglang, 200), (Flavour::Vllm, 404)] {
        let settings = Settings { flavour, ..Settings::instant() };
        let worker = MockWorker::start(settings).await.expect("a free port");
        let (head, whole) = call(&worker, CHAT, &chat(4, false)).await.expect("an answer");
        assert_eq!(head.field("x-mla-cached-tokens"), None);
        assert_eq!(parse(&whole)["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        let replay = "x-mla-replay: 1\r\n";
        let (head, stream) =
            call_with(&worker, CHAT, replay, &chat(4, true)).await.expect("an answer");
        assert_eq!(head.field("x-mla-replay"), None);
        assert!(!stream.contains(":mla"));
        let (head, info) = call(&worker, "/get_server_info", &json!({})).await.expect("an answer");
        assert_eq!(head.status, has_info);
        assert!(!info.contains("boot_id"));
    }
}

#[tokio::test]
async fn disconnected_client_frees_its_slot() {
    let settings = Settings { max_running_requests: 1, ..Settings::default() };
    let worker = MockWorker::start(settings).await.expect("a free port");
    for stream in [true, false] {
        let mut client = Client::connect(worker.address()).await.expect("listening");
        let body = chat(10_000, stream).to_string();
        client.send(&post(CHAT, "", &body)).await.expect("sent");
        while worker.stats().running == 0 {
            tokio::task::yield_now().await;
        }
        drop(client);
        soon(call(&worker, CHAT, &chat(1, false))).await.expect("its turn has come");
    }
    assert_eq!(worker.stats().totals.aborted, 2);
}

#[tokio::test]
async fn faults_of_whole_answers() {
    let worker = instant().await;
    let ask = async |stream| call(&worker, CHAT, &chat(4, stream)).await;

    call(&worker, "/mock/fault", &json!({"kind": "status", "status": 429, "count": 1}))
        .await
        .expect("an answer");
    let (head, _) = ask(false).await.expect("an answer");
    assert_eq!((head.status, head.field("retry-after")), (429, Some("1")));
    assert_eq!(ask(false).await.expect("an answer").0.status, 200);

    worker.fault(Kind::Garbage { form: Garbage::Html });
    let (head, _) = ask(true).await.expect("an answer");
    assert_eq!((head.status, head.field("content-type")), (200, Some("text/html")));
    worker.fault(Kind::Garbage { form: Garbage::Truncated });
    let (_, body) = ask(false).await.expect("an answer");
    assert!(serde_json::from_str::<Value>(&body).is_err());
    worker.fault(Kind::Break { after_tokens: 0 });
    assert_eq!(ask(false).await.expect_err("cut").kind(), io::ErrorKind::UnexpectedEof);
    worker.fault(Kind::BadChunking { after_tokens: 0 });
    assert_eq!(ask(false).await.expect_err("spoiled").kind(), io::ErrorKind::InvalidData);
    worker.fault(Kind::EngineDied { after_tokens: 0 });
    assert_eq!(ask(false).await.expect("an answer").0.status, 500);
}

#[tokio::test]
async fn faults_of_streams() {
    let worker = instant().await;
    let ask = async || call(&worker, CHAT, &chat(4, true)).await;

    worker.fault(Kind::NoDone);
    assert!(!ask().await.expect("an answer").1.contains("[DONE]"));
    worker.fault(Kind::TokensAfterDone);
    let (_, stream) = ask().await.expect("an answer");
    assert!(stream.contains("[DONE]") && !stream.ends_with("[DONE]\n\n"));
    worker.fault(Kind::EngineDied { after_tokens: 2 });
    let (_, stream) = ask().await.expect("an answer");
    assert_eq!(events(&stream).last().expect("an error")["error"]["code"], "engine_died");
    assert!(!stream.contains("[DONE]"));
    for after_tokens in [0, 2] {
        worker.fault(Kind::BadChunking { after_tokens });
        assert_eq!(ask().await.expect_err("spoiled").kind(), io::ErrorKind::InvalidData);
    }
    worker.fault(Kind::Freeze { after_tokens: 2 });
    let mut client = Client::connect(worker.address()).await.expect("listening");
    client.send(&post(CHAT, "", &chat(4, true).to_string())).await.expect("sent");
    soon(client.head()).await.expect("a head");
    let mut stream = Vec::new();
    while events(&String::from_utf8_lossy(&stream)).len() < 2 {
        assert!(soon(client.more(&mut stream)).await.expect("more"));
    }
    worker.fault(Kind::None);
    let (_, other) = ask().await.expect("the worker itself goes on");
    assert_eq!(events(&other).len(), 5);
}

#[tokio::test]
async fn killed_worker_restarts_with_an_empty_cache() {
    let mut worker = instant().await;
    call(&worker, CHAT, &chat(4, false)).await.expect("an answer");
    let boot = worker.boot_id();
    // The connection that carries the order is closed like all others.
    let ordered = call(&worker, "/mock/fault", &json!({"kind": "restart_empty"})).await;
    drop(ordered);
    let (head, _) = call(&worker, CHAT, &chat(4, false)).await.expect("an answer");
    assert_eq!(head.field("x-mla-cached-tokens"), Some("0"));
    assert_ne!(worker.boot_id(), boot);

    worker.fault(Kind::Die { after_tokens: Some(2) });
    call(&worker, CHAT, &chat(4, true)).await.expect_err("cut");
    soon(worker.died()).await;
    assert!(Client::connect(worker.address()).await.is_err());
}

#[tokio::test]
async fn frozen_worker_answers_after_thawing() {
    let worker = instant().await;
    worker.freeze();
    let mut client = Client::connect(worker.address()).await.expect("the kernel accepts");
    client.send(&post(CHAT, "", &chat(4, false).to_string())).await.expect("sent");
    let pause = timeout(Duration::from_millis(50), client.head()).await;
    assert!(pause.is_err(), "it is frozen");
    worker.thaw();
    assert_eq!(soon(client.head()).await.expect("a head").status, 200);
}

#[tokio::test(start_paused = true)]
async fn an_answer_takes_the_time_of_its_prefill_and_its_steps() {
    let settings = Settings {
        prefill_rate: 100.0,
        decode_base_ms: 50.0,
        decode_per_request_ms: 0.0,
        ..Settings::default()
    };
    let worker = MockWorker::start(settings).await.expect("a free port");
    let before = worker.stats().totals.busy_seconds;
    let (_, answer) = call(&worker, CHAT, &chat(11, false)).await.expect("an answer");
    let prompt = parse(&answer)["usage"]["prompt_tokens"].as_f64().expect("a count");
    let busy = worker.stats().totals.busy_seconds - before;
    assert!((busy - (prompt / 100.0 + 10.0 * 0.05)).abs() < 1e-6, "{busy}");
}
