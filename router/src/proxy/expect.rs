//! Whether the beginning of a 200 answer is what was asked for. A broken engine, or a proxy before
//! it, may answer anything with 200; no client should have to find that out.

use http::HeaderMap;
use serde::de::IgnoredAny;

use crate::{endpoint::Endpoint, key::RouteKey, wire::headers::say_event_stream};

/// What the body of a good answer looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expect {
    /// Not the router's to say.
    Anything,
    /// Server-sent events, as they are made.
    Events,
    /// One JSON value; a list only where a batch may be asked for.
    Json { list: bool },
}

/// What each line of an event stream begins with.
const FIELDS: [&[u8]; 5] = [b"data:", b":", b"event:", b"id:", b"retry:"];

impl Expect {
    pub(super) fn of(endpoint: Endpoint, key: Option<&RouteKey>) -> Self {
        match key {
            Some(key) if key.stream => Self::Events,
            Some(key) if key.stream_unclear => Self::Anything,
            Some(_) => Self::Json { list: endpoint == Endpoint::Generate },
            None => Self::Anything,
        }
    }

    /// Judges the head and the first bytes of a body; what is wrong, if anything.
    pub(super) fn begins(self, headers: &HeaderMap, first: &[u8]) -> Result<(), &'static str> {
        let text = first.trim_ascii_start();
        match self {
            Self::Anything => Ok(()),
            Self::Events if say_event_stream(headers) == Some(false) => Err("not an event stream"),
            Self::Events if first.is_empty() => Err("an event stream without an event"),
            // A field may be cut in the middle; a blank line is no mistake.
            Self::Events if FIELDS.iter().any(|field| agree(field, text)) => Ok(()),
            Self::Events => Err("no event in an event stream"),
            Self::Json { .. } if first.is_empty() => Err("nothing instead of JSON"),
            Self::Json { list } => match text.first() {
                None | Some(b'{') => Ok(()),
                Some(b'[') if list => Ok(()),
                Some(_) => Err("not a JSON object"),
            },
        }
    }

    /// Judges a whole body that has begun well.
    pub(super) fn is_whole(self, body: &[u8]) -> Result<(), &'static str> {
        match self {
            Self::Json { .. } if serde_json::from_slice::<IgnoredAny>(body).is_err() => {
                Err("broken JSON")
            }
            _ => Ok(()),
        }
    }
}

/// One is the beginning of the other.
fn agree(one: &[u8], other: &[u8]) -> bool {
    one.iter().zip(other).all(|(one, other)| one == other)
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, header};

    use super::*;

    const JSON: Expect = Expect::Json { list: false };
    const BATCH: Expect = Expect::Json { list: true };

    fn typed(content_type: &'static str) -> HeaderMap {
        [(header::CONTENT_TYPE, HeaderValue::from_static(content_type))].into_iter().collect()
    }

    #[test]
    fn good_beginnings_are_good_wherever_they_are_cut() {
        let good = [
            (Expect::Events, "data: {}\n\n"),
            (Expect::Events, ": ping\n\n"),
            (Expect::Events, "\r\nevent: message\n"),
            (JSON, " \n{\"a\":1}"),
            (BATCH, "[{}]"),
            (Expect::Anything, "<html>"),
        ];
        for (expect, text) in good {
            for cut in 1..=text.len() {
                assert_eq!(expect.begins(&HeaderMap::new(), &text.as_bytes()[..cut]), Ok(()));
            }
            assert_eq!(expect.is_whole(text.as_bytes()), Ok(()), "{text}");
        }
        let streams = typed("Text/Event-Stream; charset=utf-8");
        assert_eq!(Expect::Events.begins(&streams, b"data: 1"), Ok(()));
    }

    #[test]
    fn garbage_is_not_an_answer() {
        for (expect, text) in [
            (Expect::Events, "<html>"),
            (Expect::Events, "{\"choices\":[]}"),
            (Expect::Events, "date: 1"),
            (Expect::Events, ""),
            (JSON, "<html>"),
            (JSON, "data: {}\n\n"),
            (JSON, "[{}]"),
            (JSON, ""),
        ] {
            assert!(expect.begins(&HeaderMap::new(), text.as_bytes()).is_err(), "{text:?}");
        }
        assert!(Expect::Events.begins(&typed("text/html"), b"data: 1").is_err());
        for text in ["{\"a\":", "{\"a\":1}}", "{garbage}", "   "] {
            assert!(JSON.is_whole(text.as_bytes()).is_err(), "{text:?}");
        }
    }
}
