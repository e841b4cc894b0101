//! Continuing a broken stream on another worker.
//!
//! A worker of ours that is asked so by a request header answers with a header of its own, whatever
//! it needs to be continued, and tells with each event which tokens it stands for. If it dies, the
//! same request goes to another worker with both of these in it, and that one goes on where the
//! client's stream has ended. The client sees neither of it.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use memchr::memmem;

use crate::{
    body::transcript::{self, Transcript},
    proxy::{replay::HEADER, rewrite::with_field},
};

/// Longest answer that is remembered.
const LONGEST_ANSWER: usize = 512;

/// A stream is continued at most so often: what breaks that many workers is most likely the request.
const MOST_REPLAYS: u32 = 3;

/// What it takes to continue one stream.
#[derive(Debug)]
pub struct Replay {
    /// As the worker has answered; given back to the next one.
    answer: HeaderValue,
    transcript: Transcript,
    /// That the client has had. The ids alone do not tell, where a token makes several.
    events: u64,
    replays: u32,
    /// The worker has not told all tokens, or too many.
    lost_track: bool,
    /// The counts are out, which come last.
    counted: bool,
}

impl Replay {
    /// Takes the worker's answer out of the response's headers, which the client has no use for.
    pub fn take(headers: &mut HeaderMap) -> Option<Self> {
        let answer = headers.remove(HEADER).filter(is_good)?;
        let transcript = Transcript::default();
        Some(Self { answer, transcript, events: 0, replays: 0, lost_track: false, counted: false })
    }

    /// Another worker goes on. False if it does not know how to.
    pub fn go_on(&mut self, headers: &mut HeaderMap) -> bool {
        let answer = headers.remove(HEADER).filter(is_good);
        answer.map(|answer| self.answer = answer).is_some()
    }

    /// Notes the beginning of an event, and returns how many bytes of it are not for the client.
    pub fn note(&mut self, event: &[u8]) -> usize {
        let (mut lines, length) = transcript::split(event);
        self.lost_track |= lines.any(|line| self.transcript.note(line).is_err());
        // OpenAI's mark of the chunk with the counts, which no text can contain unescaped. Events with
        // a name are the Responses API's, which repeat schemas that the client has sent.
        let is_chunk = length == 0 && event.starts_with(b"data:");
        self.counted |= is_chunk && memmem::find(event, b"\"choices\":[]").is_some();
        length
    }

    /// An event, or a comment, goes to the client.
    pub fn passed(&mut self, event: &[u8]) {
        self.events += u64::from(!event.starts_with(b":"));
    }

    /// Whether all events have come but the last, `[DONE]`.
    pub fn is_complete(&self) -> bool {
        self.counted
    }

    /// Whether the stream could be continued, if it broke now.
    pub fn is_possible(&self) -> bool {
        !self.lost_track && self.replays < MOST_REPLAYS
    }

    /// The body for the next worker, or `None` if it is better to give up.
    pub fn next_body(&mut self, body: &Bytes) -> Option<Bytes> {
        if !self.is_possible() {
            return None;
        }
        self.replays += 1;
        self.continuation(body)
    }

    /// `body` with one more field, which tells what has been said already.
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
    visible && (1..=LONGEST_ANSWER).contains(&answer.len())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn replay(answer: &str) -> Option<Replay> {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, answer.parse().expect("a header value"));
        let replay = Replay::take(&mut headers);
        assert!(headers.is_empty(), "the client has no use for it");
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
            assert_eq!(replay.note(b":mla 0 1,2\ndata: {}\n\n"), 11);
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
    fn it_ends_some_time() {
        let body = Bytes::from_static(b"{}");
        let mut progressing = replay("a").expect("a good answer");
        for _ in 0..MOST_REPLAYS {
            assert_eq!(progressing.note(b"data: {}\n\n"), 0);
            assert!(progressing.next_body(&body).is_some());
        }
        assert_eq!(progressing.note(b"data: {}\n\n"), 0);
        assert_eq!(progressing.next_body(&body), None);
    }

    #[test]
    fn an_answer_that_cannot_be_given_back_is_none() {
        assert!(replay("").is_none());
        assert!(replay("a\tb").is_none());
        assert!(replay("ü").is_none());
    }
}
