//! Token counts of a stream that the router requests for itself.
//!
//! SGLang and vLLM report the counts of a stream only on request. If the client does not set `stream_options`, the
//! router adds the field, and removes the counts from the stream: the event that has only counts, and the field
//! `usage` of other events.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

use super::json_field::with_field;
use crate::{key::json::Cursor, wire::events::parts};

/// Makes an engine end its stream with an event that has the token counts.
const INCLUDE_USAGE: &[u8] = br#""stream_options":{"include_usage":true}"#;

/// A longer body is not copied to add the field.
const MAX_COPIED: usize = 1 << 20;

static USAGE: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\"usage\""));

/// Returns `body` with a request for the counts. `None` if the body is too long to copy, or does not end like an
/// object.
pub(crate) fn ask(body: &[u8]) -> Option<Bytes> {
    if body.len() > MAX_COPIED { None } else { with_field(body, INCLUDE_USAGE) }
}

/// Returns the part of a complete event that the client gets: nothing if the event has only counts.
pub(crate) fn without(event: Bytes) -> Bytes {
    if USAGE.find(&event).is_none() {
        return event;
    }
    let (_, data) = parts(&event);
    let (mut choices, mut usage) = (None, None);
    let read = Cursor::new(data).object(|name, value| {
        match name {
            b"choices" => choices = Some(value),
            b"usage" => usage = Some(value),
            _ => {}
        }
        Ok(())
    });
    let (Ok(()), Some(choices), Some(usage)) = (read, choices, usage) else { return event };
    if is_empty(choices) && usage != b"null" {
        return Bytes::new();
    }
    let at = usage.as_ptr().addr() - event.as_ptr().addr();
    cut_field(&event[..at], &event[at + usage.len()..]).unwrap_or(event)
}

fn is_empty(list: &[u8]) -> bool {
    let inner = list.strip_prefix(b"[").and_then(|list| list.strip_suffix(b"]"));
    inner.is_some_and(|inner| inner.trim_ascii().is_empty())
}

/// Returns the event without the field `usage`, whose value lies between `before` and `after`, and without its comma.
/// `None` if the name of the field has escapes.
fn cut_field(before: &[u8], after: &[u8]) -> Option<Bytes> {
    let before = before.trim_ascii_end().strip_suffix(b":")?.trim_ascii_end();
    let before = before.strip_suffix(b"\"usage\"")?.trim_ascii_end();
    let (before, after) = match before.strip_suffix(b",") {
        Some(before) => (before, after),
        None => (before, after.trim_ascii_start().strip_prefix(b",").unwrap_or(after)),
    };
    let mut event = BytesMut::with_capacity(before.len() + after.len());
    event.extend_from_slice(before);
    event.extend_from_slice(after);
    Some(event.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_gets_the_events_of_a_stream_without_counts() {
        for (event, seen) in [
            // vLLM
            (
                r#"{"id":"x","choices":[],"usage":{"prompt_tokens":31,"completion_tokens":10}}"#,
                None,
            ),
            (r#"{"id":"x", "choices": [ ], "usage": {"prompt_tokens": 31}}"#, None),
            // SGLang
            (
                r#"{"id":"x","choices":[{"delta":{"content":"a"}}],"usage":null}"#,
                Some(r#"{"id":"x","choices":[{"delta":{"content":"a"}}]}"#),
            ),
            (
                r#"{"usage" : null, "choices":[{"text":"\"usage\":null"}]}"#,
                Some(r#"{ "choices":[{"text":"\"usage\":null"}]}"#),
            ),
            (r#"{"usage":{"a":1},"choices":[{}],"b":2}"#, Some(r#"{"choices":[{}],"b":2}"#)),
            (r#"{"a":1,"usage":null,"choices":[{}]}"#, Some(r#"{"a":1,"choices":[{}]}"#)),
            // Other places with this name stay.
            (r#"{"choices":[{"x":{"usage":1}}]}"#, Some(r#"{"choices":[{"x":{"usage":1}}]}"#)),
            (r#"{"error":{"usage":1}}"#, Some(r#"{"error":{"usage":1}}"#)),
            (r#"{"choices":[{}],"usage":"#, Some(r#"{"choices":[{}],"usage":"#)),
            ("[DONE]", Some("[DONE]")),
        ] {
            let seen = seen.map_or_else(String::new, |seen| format!("data: {seen}\n\n"));
            let event = format!("data: {event}\n\n");
            assert_eq!(without(Bytes::from(event.clone())), seen, "{event}");
        }
    }
}
