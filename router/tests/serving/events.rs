//! Streams of events. The client gets the events of the worker, except those that should not have been sent, and
//! can always tell a complete answer from a broken one.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body_util::BodyExt;
use mla_router::{Config, config::PolicyName};
use tokio::sync::mpsc;

use crate::support::{
    Client, Event, FakeWorker, Reply, Then, assert_nothing_reserved, config, post, router, secs,
};

const PATH: &str = "/v1/chat/completions";
const BODY: &str = r#"{"messages":[{"role":"user","content":"hello"}],"stream":true}"#;
const TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\u{fc}\"}}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";

/// Returns the client's bytes of a stream that the worker sends in these frames.
async fn through(frames: Vec<Bytes>, then: Then) -> String {
    through_with(config(), PATH, frames, then).await
}

async fn through_with(config: Config, path: &str, frames: Vec<Bytes>, then: Then) -> String {
    let frames = parking_lot::Mutex::new(frames);
    let worker = FakeWorker::start(move |_| {
        Reply::Stream(HeaderMap::new(), std::mem::take(&mut frames.lock()), then)
    })
    .await;
    let router = router(config, &[&worker]).await;
    let answer = Client::connect(router.local_addr()).await.post(path, BODY).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
    assert_nothing_reserved(&router).await;
    String::from_utf8(answer.body.to_vec()).expect("UTF-8")
}

fn frames(stream: &str, size: usize) -> Vec<Bytes> {
    stream.as_bytes().chunks(size).map(Bytes::copy_from_slice).collect()
}

/// Returns the code of the error event at the end of `stream`.
fn error_at_the_end_of(stream: &str) -> String {
    assert!(!stream.contains("[DONE]"), "{stream}");
    let (_, event) = stream.trim_end().rsplit_once("data: ").expect("an event");
    let event: serde_json::Value = serde_json::from_str(event).expect("JSON");
    assert!(event["error"]["message"].is_string() && event["error"]["type"].is_string());
    event["error"]["code"].as_str().expect("a code").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_the_same_however_they_are_cut() {
    let stream = format!("{TOKEN}: ping\n\n{TOKEN}{}{DONE}", TOKEN.replace('\n', "\r\n"));
    for size in 1..=stream.len() {
        assert_eq!(through(frames(&stream, size), Then::End).await, stream, "frames of {size}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_stream_has_complete_events_and_an_error() {
    let stream = format!("{TOKEN}{TOKEN}{DONE}");
    let whole = |length: usize| (length / TOKEN.len()).min(2) * TOKEN.len();
    for cut in TOKEN.len()..stream.len() {
        for then in [Then::Break, Then::End] {
            let got = through(frames(&stream[..stream.floor_char_boundary(cut)], 7), then).await;
            assert_eq!(error_at_the_end_of(&got), "stream_broken", "cut at {cut}, {then:?}");
            let kept = got.find("data: {\"error\"").expect("the error");
            assert_eq!(&got[..kept], &stream[..whole(cut)], "cut at {cut}, {then:?}");
        }
    }
    assert_eq!(through(frames(&stream, 7), Then::Break).await, stream, "all of it had come");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_broken_in_its_first_event_is_retried() {
    let stream = format!("{TOKEN}{DONE}");
    for (cut, then) in (1..TOKEN.len()).flat_map(|cut| [(cut, Then::Break), (cut, Then::End)]) {
        let begun = Bytes::copy_from_slice(&TOKEN.as_bytes()[..cut]);
        let mut breaking =
            FakeWorker::start(move |_| Reply::Stream(HeaderMap::new(), vec![begun.clone()], then))
                .await;
        let whole = frames(&stream, 7);
        let good =
            FakeWorker::start(move |_| Reply::Stream(HeaderMap::new(), whole.clone(), Then::End))
                .await;
        let config = Config { policy: PolicyName::RoundRobin, ..config() };
        let router = router(config, &[&breaking, &good]).await;
        let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
        assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, stream.as_bytes()));
        assert_eq!(breaking.requests_so_far(), 1, "cut at {cut}, {then:?}");
        assert_nothing_reserved(&router).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_follows_the_last_event() {
    let whole = format!("{TOKEN}{DONE}");
    for behind in [DONE, TOKEN, "garbage", ": ping\n\n"] {
        let stream = format!("{whole}{behind}");
        for then in [Then::End, Then::Break, Then::Silence] {
            for size in [stream.len(), 5] {
                let got = through(frames(&stream, size), then).await;
                assert_eq!(got, whole, "{behind:?} {then:?}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn done_never_follows_an_error() {
    let error = "data: {\"error\":{\"message\":\"full\",\"type\":\"x\",\"code\":\"oom\"}}\n\n";
    let got = through(frames(&format!("{TOKEN}{error}{DONE}"), 1000), Then::End).await;
    assert_eq!(got, format!("{TOKEN}{error}"));
    assert_eq!(error_at_the_end_of(&got), "oom");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_streams_are_forwarded_to_their_end() {
    let stream = "event: progress\ndata: {}\n\ndata: half";
    let got = through_with(config(), "/v1/others", frames(stream, 10), Then::End).await;
    assert_eq!(got, stream);
    let stream = "event: progress\ndata: {}\n\n";
    let got = through_with(config(), "/v1/others", frames(stream, 10), Then::Break).await;
    assert_eq!(error_at_the_end_of(&got), "stream_broken");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_streams_end_with_their_final_event() {
    let path = "/v1/responses";
    let event = |name: &str, data: &str| format!("event: {name}\ndata: {{\"a\":\"{data}\"}}\n\n");
    let begun = event("response.created", "");
    for name in ["response.completed", "response.incomplete", "response.failed", "error"] {
        for data in ["x".to_owned(), "x".repeat(1 << 18)] {
            let whole = format!("{begun}{}", event(name, &data));
            for behind in ["", TOKEN, "data: half"] {
                for then in [Then::End, Then::Break] {
                    let sent = frames(&format!("{whole}{behind}"), 10_000);
                    let got = through_with(config(), path, sent, then).await;
                    assert!(got == whole, "{name} {behind:?} {then:?}: {} bytes", got.len());
                }
            }
        }
    }
    for unfinished in
        ["", "event: response.completed\ndata: {}\n", "event: response.completed.\n\n"]
    {
        for then in [Then::End, Then::Break] {
            let sent = frames(&format!("{begun}{unfinished}"), 10);
            let got = through_with(config(), path, sent, then).await;
            assert_eq!(error_at_the_end_of(&got), "stream_broken", "{unfinished:?} {then:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_streams_end_with_their_final_event_or_a_named_error() {
    let path = "/v1/messages";
    let begun = "event: message_start\ndata: {\"type\":\"message_start\"}\n\n";
    let whole = format!("{begun}event: message_stop\ndata: {{\"type\":\"message_stop\"}}\n\n");
    for then in [Then::End, Then::Break] {
        for behind in ["", "event: ping\ndata: {}\n\n"] {
            let sent = frames(&format!("{whole}{behind}"), 10);
            assert_eq!(through_with(config(), path, sent, then).await, whole, "{then:?}");
        }
        let got = through_with(config(), path, frames(begun, 10), then).await;
        assert_eq!(error_at_the_end_of(&got), "stream_broken", "{then:?}");
        let last = got.strip_prefix(begun).expect("the events of the worker");
        let data = last.strip_prefix("event: error\ndata: ").expect("a named event");
        let data: serde_json::Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(data["type"], "error");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compressed_stream_is_forwarded_unchanged() {
    let body = Bytes::from_static(b"\x1f\x8b not events \n\n at all");
    let sent = body.clone();
    let worker = FakeWorker::start(move |_| {
        let encoding =
            ("content-encoding".parse().expect("a name"), HeaderValue::from_static("gzip"));
        Reply::Stream([encoding].into_iter().collect(), vec![sent.clone()], Then::End)
    })
    .await;
    let router = router(config(), &[&worker]).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
    assert_eq!(answer.body, body);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_event_arrives_complete_or_breaks_the_connection() {
    let event = format!("data: {}\n\n", "x".repeat(1 << 20));
    let stream = format!("{TOKEN}{event}{DONE}");
    assert!(through(frames(&stream, 10_000), Then::End).await == stream);
    // A long first event is not held back either.
    for stream in [stream, format!("{event}{DONE}")] {
        let begun = frames(&stream[..1 << 19], 10_000);
        let mut breaking =
            FakeWorker::start(move |_| Reply::Stream(HeaderMap::new(), begun.clone(), Then::Break))
                .await;
        let mut other = FakeWorker::plain().await;
        let config = Config { policy: PolicyName::RoundRobin, ..config() };
        let router = router(config, &[&breaking, &other]).await;
        let broken = Client::connect(router.local_addr()).await.call(post(PATH, BODY)).await;
        assert!(broken.is_err(), "half an event was passed off as a whole answer");
        assert_eq!((breaking.requests_so_far(), other.requests_so_far()), (1, 0));
    }
}

/// A worker with one stream whose frames come from the test.
async fn fed(
    config: Config,
) -> (FakeWorker, mla_router::RouterHandle, mpsc::UnboundedSender<Bytes>) {
    let (sender, source) = mpsc::unbounded_channel();
    let source = parking_lot::Mutex::new(Some(source));
    let worker =
        FakeWorker::start(move |_| Reply::Events(source.lock().take().expect("one request"))).await;
    let router = router(config, &[&worker]).await;
    (worker, router, sender)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quiet_stream_gets_keepalives_and_stays_open() {
    let config =
        Config { sse_keepalive_secs: secs(0.03), inter_token_timeout_secs: secs(0.01), ..config() };
    let (_worker, router, sender) = fed(config).await;
    let mut client = Client::connect(router.local_addr()).await;
    sender.send(Bytes::from_static(TOKEN.as_bytes())).expect("streaming");
    let mut response = client.send(post(PATH, BODY)).await.expect("a head");
    let mut next = async || {
        let frame = response.frame().await.expect("not over").expect("not broken");
        String::from_utf8(frame.into_data().expect("data").to_vec()).expect("UTF-8")
    };
    assert_eq!(next().await, TOKEN);
    for _ in 0..3 {
        assert_eq!(next().await, ": ping\n\n");
    }
    // Half an event: a comment within it would break it.
    let (first, second) = TOKEN.split_at(20);
    sender.send(Bytes::from_static(first.as_bytes())).expect("streaming");
    assert_eq!(next().await, ": ping\n\n");
    sender.send(Bytes::from_static(second.as_bytes())).expect("streaming");
    let mut got = next().await;
    while got == ": ping\n\n" {
        got = next().await;
    }
    assert_eq!(got, TOKEN);
}

/// The paused clock advances to the next timer when all tasks are idle.
#[tokio::test(start_paused = true)]
async fn stream_over_its_time_limit_ends_with_an_error() {
    let config = Config { request_timeout_secs: secs(0.2), ..config() };
    let (mut worker, router, sender) = fed(config).await;
    sender.send(Bytes::from_static(TOKEN.as_bytes())).expect("streaming");
    let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
    let got = String::from_utf8(answer.body.to_vec()).expect("UTF-8");
    assert_eq!(error_at_the_end_of(&got), "timeout");
    worker.request().await;
    assert!(matches!(worker.event().await, Event::Aborted));
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_stream_ends_when_its_worker_is_down() {
    let config = Config { inter_token_timeout_secs: secs(0.05), ..config() };
    let (mut worker, router, sender) = fed(config).await;
    sender.send(Bytes::from_static(TOKEN.as_bytes())).expect("streaming");
    let mut client = Client::connect(router.local_addr()).await;
    let mut response = client.send(post(PATH, BODY)).await.expect("a head");
    response.frame().await.expect("not over").expect("not broken");
    worker.set_healthy(false);
    let rest = response.collect().await.expect("a whole response").to_bytes();
    assert_eq!(error_at_the_end_of(std::str::from_utf8(&rest).expect("UTF-8")), "stream_stuck");
    worker.request().await;
    assert!(matches!(worker.event().await, Event::Aborted));
    assert_nothing_reserved(&router).await;
}
