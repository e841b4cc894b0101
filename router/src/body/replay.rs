//! The state for the continuation of a broken stream on another worker.
//!
//! A worker whose stream can be continued sends a header with an opaque value, and the token ids of each event. If the
//! worker dies, the router sends the same request to another worker, with this value and the ids. That worker
//! continues the stream after the last event that the client has received. The router removes header and ids from the
//! stream.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use memchr::memmem;

use crate::engine::{
    continuation::HEADER,
    json_field::with_field,
    transcript::{self, Transcript},
};

/// Maximum length of the opaque value in bytes.
const MAX_ANSWER: usize = 512;

/// Maximum number of continuations of a stream. A request that breaks more workers is probably the cause itself.
const MAX_REPLAYS: u32 = 3;

/// The continuation state of one stream.
#[derive(Debug)]
pub struct Replay {
    /// The opaque value of the worker; sent to the next one.
    answer: HeaderValue,
    transcript: Transcript,
    /// Number of events that the client has received. It does not follow from the ids: a token may make
    /// several events.
    events: u64,
    replays: u32,
    /// Whether the token ids are incomplete, or too many.
    lost_track: bool,
    /// Whether the event with the token counts, the last one before `[DONE]`, was received.
    counted: bool,
}

impl Replay {
    /// Takes the opaque value out of the response headers. `None` if the worker cannot continue the stream.
    pub fn take(headers: &mut HeaderMap) -> Option<Self> {
        let answer = headers.remove(HEADER).filter(is_good)?;
        let transcript = Transcript::default();
        Some(Self { answer, transcript, events: 0, replays: 0, lost_track: false, counted: false })
    }

    /// Takes the opaque value of the worker that continues the stream. Returns false if it did not send a
    /// valid one.
    pub fn resume_with(&mut self, headers: &mut HeaderMap) -> bool {
        let answer = headers.remove(HEADER).filter(is_good);
        answer.map(|answer| self.answer = answer).is_some()
    }

    /// Reads the start of an event. Returns the number of its leading bytes that are not for the client.
    pub fn read(&mut self, event: &[u8]) -> usize {
        let (mut lines, length) = transcript::split(event);
        self.lost_track |= lines.any(|line| self.transcript.add(line).is_err());
        // The chunk with the counts has no choices. Text cannot contain this unescaped. Named events belong to the
        // Responses API and may repeat a schema of the client, so they are excluded.
        let is_chunk = length == 0 && event.starts_with(b"data:");
        self.counted |= is_chunk && memmem::find(event, b"\"choices\":[]").is_some();
        length
    }

    /// Counts an event that is passed to the client. Comments do not count.
    pub fn passed(&mut self, event: &[u8]) {
        self.events += u64::from(!event.starts_with(b":"));
    }

    /// Whether all events but the last, `[DONE]`, have come.
    pub fn is_complete(&self) -> bool {
        self.counted
    }

    /// Whether the stream could be continued if it broke now.
    pub fn is_possible(&self) -> bool {
        !self.lost_track && self.replays < MAX_REPLAYS
    }

    /// Returns the body for the next worker, and counts the continuation. `None` if the stream cannot be continued.
    pub fn next_body(&mut self, body: &Bytes) -> Option<Bytes> {
        if !self.is_possible() {
            return None;
        }
        self.replays += 1;
        self.continuation(body)
    }

    /// Returns `body` with the field `continuation`, which holds the state.
    fn continuation(&self, body: &[u8]) -> Option<Bytes> {
        let mut field = Vec::new();
        field.extend_from_slice(b"\"continuation\":{\"response\":\"");
        for &byte in self.answer.as_bytes() {
            if matches!(byte, b'"' | b'\\') {
                field.push(b'\\');
            }
            field.push(byte);
        }
        field.extend_from_slice(b"\",\"choices\":");
        self.transcript.write_json(&mut field);
        field.extend_from_slice(format!(",\"events\":{}}}", self.events).as_bytes());
        with_field(body, &field)
    }
}

fn is_good(answer: &HeaderValue) -> bool {
    let visible = answer.as_bytes().iter().all(|byte| matches!(byte, b' '..=b'~'));
    visible && (1..=MAX_ANSWER).contains(&answer.len())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn replay(answer: &str) -> Option<Replay> {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, answer.parse().expect("a header value"));
        let replay = Replay::take(&mut headers);
        assert!(headers.is_empty(), "the client does not get it");
        replay
    }

    #[test]
    fn the_next_worker_gets_the_same_request_and_one_more_field() {
        for (body, others) in [
            (r#"{"stream":true,"prompt":"}"}"#, json!({"stream": true, "prompt": "}"})),
            ("\n{ \"stream\": true }\r\n ", json!({"stream": true})),
            ("{}", json!({})),
        ] {
            let mut replay = replay(r#"id="x\y""#).expect("a good answer");
            assert_eq!(replay.read(b":mla 0 1,2\ndata: {}\n\n"), 11);
            replay.passed(b": a comment\n\n");
            replay.passed(b"data: {}\n\n");
            let next = replay.next_body(&Bytes::from_static(body.as_bytes())).expect("the first");
            let mut sent: Value = serde_json::from_slice(&next).expect("JSON");
            let field = sent.as_object_mut().expect("an object").remove("continuation");
            assert_eq!(sent, others);
            assert_eq!(
                field.expect("a continuation"),
                json!({
                    "response": r#"id="x\y""#,
                    "choices": [{"token_ids": [1, 2], "finish_reason": null}],
                    "events": 1,
                })
            );
        }
    }

    #[test]
    fn the_number_of_continuations_is_bounded() {
        let body = Bytes::from_static(b"{}");
        let mut progressing = replay("a").expect("a good answer");
        for _ in 0..MAX_REPLAYS {
            assert_eq!(progressing.read(b"data: {}\n\n"), 0);
            assert!(progressing.next_body(&body).is_some());
        }
        assert_eq!(progressing.read(b"data: {}\n\n"), 0);
        assert_eq!(progressing.next_body(&body), None);
    }

    #[test]
    fn a_value_that_cannot_be_sent_back_is_refused() {
        assert!(replay("").is_none());
        assert!(replay("a\tb").is_none());
        assert!(replay("ü").is_none());
    }
}
