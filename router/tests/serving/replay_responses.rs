//! Tests the continuation of a broken stream of the Responses API. Each token makes several events, the events are
//! numbered, and the last event has a name.

use std::sync::Arc;

use mla_router::Config;
use serde_json::Value;

use crate::{
    replay::{Engine, Fleet},
    support::{Then, assert_nothing_reserved, config},
};

/// The answer repeats the schema. The router must not take it for OpenAI's chunk of counts.
const BODY: &str = r#"{"stream":true,"input":"}","text":{"schema":{"choices":[]}}}"#;
const TOKENS: u64 = 4;
const EVENTS_A_TOKEN: u64 = 3;
const BEGINNING: [&str; 2] = ["created", "in_progress"];

/// An engine with a known token at each position, and its events.
fn stream(said: Option<&Value>, marks: bool) -> String {
    let had = said.map_or(0, |said| said["events"].as_u64().expect("a count"));
    let ids = said.and_then(|said| said["choices"].get(0)).map(|choice| &choice["token_ids"]);
    let ids = ids.map_or(&[][..], |ids| ids.as_array().expect("ids"));
    let (mut events, mut made) = (Vec::new(), 0);
    let mut event = |mark: &str, name: &str, response: &str| {
        if made >= had {
            let mark = if marks { mark } else { "" };
            let data = format!(
                "{{\"type\":\"response.{name}\",\"sequence_number\":{made},\"a\":{response}}}"
            );
            events.push(format!("{mark}event: response.{name}\ndata: {data}\n\n"));
        }
        made += 1;
        made
    };
    for name in BEGINNING {
        event("", name, r#"{"text":{"schema":{"choices":[]}}}"#);
    }
    for place in 0..TOKENS {
        let last = if place + 1 == TOKENS { " stop" } else { "" };
        let mark = format!(":mla 0 {}{last}\n", 1000 + place);
        let known = ids.get(place as usize);
        assert!(known.is_none_or(|id| *id == 1000 + place), "{known:?} at {place}");
        for part in 0..EVENTS_A_TOKEN {
            let mark = if part == 0 && known.is_none() { &mark } else { "" };
            let made = event(mark, "output_text.delta", "\"\u{fc}\u{1f600}\"");
            // The router learns of a token with the first of its events.
            assert!(known.is_none() || part > 0 || made <= had, "{made} but {had}");
            assert!(known.is_some() || made > had, "{made} but {had}");
        }
    }
    event("", "completed", r#"{"text":{"schema":{"choices":[]}}}"#);
    events.concat()
}

fn engine() -> Engine {
    Engine { path: "/v1/responses", body: BODY, stream: Arc::new(stream) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_cut_at_any_byte_is_continued() {
    // All streams of a worker fail, so the breakers would take out all workers.
    let config = Config { cb_failure_threshold: 10_000, ..config() };
    let mut fleet = Fleet::new(config, engine()).await;
    let (whole, sent) = (fleet.whole(), stream(None, true));
    assert_eq!(fleet.ask(&[]).await, whole);
    for cut in 1..sent.len() {
        let then = if cut % 2 == 0 { Then::Break } else { Then::End };
        assert_eq!(fleet.ask(&[(cut, then)]).await, whole, "cut at {cut}");
        assert_eq!(fleet.requests(), 2, "cut at {cut}");
    }
    for then in [Then::Break, Then::Silence] {
        assert_eq!(fleet.ask(&[(sent.len(), then)]).await, whole);
        assert_eq!(fleet.requests(), 1, "all of it had come");
    }
    // A stream that breaks in its first event is retried.
    let first = sent.find("\n\n").expect("an event") + 2;
    assert_eq!(fleet.replays("continued"), (sent.len() - first).to_string());
    assert_nothing_reserved(&fleet.router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_is_continued_more_than_once() {
    let config = Config { cb_failure_threshold: 10_000, ..config() };
    let mut fleet = Fleet::new(config, engine()).await;
    let whole = fleet.whole();
    let length = stream(None, true).len();
    for first in (200..length / 2).step_by(17) {
        for second in (150..length / 2).step_by(41) {
            let cuts = [(first, Then::Break), (second, Then::End)];
            assert_eq!(fleet.ask(&cuts).await, whole, "{cuts:?}");
            assert_eq!(fleet.requests(), 3, "{cuts:?}");
        }
    }
    assert_nothing_reserved(&fleet.router).await;
}
