//! Checks whether the start of a response with status 200 is an answer of the requested API. A broken engine, or a
//! proxy in front of it, may send anything with status 200.

use http::HeaderMap;
use memchr::memchr;
use serde::{Deserialize, de::IgnoredAny};

use crate::{endpoint::Endpoint, key::RouteKey, wire::headers::content_type_is_event_stream};

/// The expected form of a response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    /// Any body: the router does not know the form.
    Anything,
    /// A stream of server-sent events of this API.
    Events(Api),
    /// One JSON value of this API.
    Json(Api),
}

/// A group of endpoints with the same form of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    /// OpenAI's chat completions and completions.
    Choices,
    /// OpenAI's responses.
    Responses,
    /// Anthropic's Messages API.
    Messages,
    /// SGLang's `/generate`. The answer to a batch is a list.
    Generate,
}

/// The fields that identify an answer. Each API has some of them; other fields are not checked.
#[derive(Deserialize)]
struct Fields {
    choices: Option<Vec<IgnoredAny>>,
    output: Option<Vec<IgnoredAny>>,
    content: Option<IgnoredAny>,
    text: Option<IgnoredAny>,
    output_ids: Option<IgnoredAny>,
    /// In each event of the Responses or Messages API.
    #[serde(rename = "type")]
    kind: Option<IgnoredAny>,
    /// In the last event of a failed stream.
    error: Option<IgnoredAny>,
}

/// The possible starts of a line of an event stream.
const FIELDS: [&[u8]; 5] = [b"data:", b":", b"event:", b"id:", b"retry:"];

impl Expect {
    pub(crate) fn of(endpoint: Endpoint, key: Option<&RouteKey>) -> Self {
        match key {
            Some(key) if !key.stream_unclear => {
                let api = match endpoint {
                    Endpoint::Generate => Api::Generate,
                    Endpoint::Responses => Api::Responses,
                    Endpoint::Messages => Api::Messages,
                    _ => Api::Choices,
                };
                if key.stream { Self::Events(api) } else { Self::Json(api) }
            }
            _ => Self::Anything,
        }
    }

    pub(crate) fn is_stream(self) -> bool {
        matches!(self, Self::Events(_))
    }

    /// Checks the head and the first bytes of a body. Returns the defect as an error.
    pub(crate) fn check_start(self, headers: &HeaderMap, first: &[u8]) -> Result<(), &'static str> {
        let text = first.trim_ascii_start();
        match self {
            Self::Anything => Ok(()),
            Self::Events(_) if content_type_is_event_stream(headers) == Some(false) => {
                Err("not an event stream")
            }
            Self::Events(_) if first.is_empty() => Err("an event stream without an event"),
            // The first bytes may end within a field, or be a blank line.
            Self::Events(_) if FIELDS.iter().any(|field| agree(field, text)) => Ok(()),
            Self::Events(_) => Err("no event in an event stream"),
            Self::Json(_) if first.is_empty() => Err("nothing instead of JSON"),
            Self::Json(api) => match text.first() {
                None | Some(b'{') => Ok(()),
                Some(b'[') if api == Api::Generate => Ok(()),
                Some(_) => Err("not a JSON object"),
            },
        }
    }

    /// Checks a whole body whose start was good.
    pub(crate) fn check_whole(self, body: &[u8]) -> Result<(), &'static str> {
        match self {
            Self::Json(api) => api.check_answer(body),
            _ => Ok(()),
        }
    }

    /// Checks the complete first event of a stream. An event without data is a comment.
    pub(crate) fn check_event(self, event: &[u8]) -> Result<(), &'static str> {
        match (self, data_of(event)) {
            (Self::Events(api), Some(data)) => api.check_event(data),
            _ => Ok(()),
        }
    }
}

impl Api {
    fn check_answer(self, body: &[u8]) -> Result<(), &'static str> {
        const BROKEN: &str = "broken JSON";
        const FOREIGN: &str = "JSON without the fields of this API";
        let is_complete = |fields: &Fields| match self {
            Self::Choices => fields.choices.is_some(),
            Self::Responses => fields.output.is_some(),
            Self::Messages => fields.content.is_some(),
            Self::Generate => fields.text.is_some() || fields.output_ids.is_some(),
        };
        let is_good = if body.trim_ascii_start().starts_with(b"[") {
            let batch: Vec<Fields> = serde_json::from_slice(body).map_err(|_| BROKEN)?;
            batch.iter().all(is_complete)
        } else {
            is_complete(&serde_json::from_slice(body).map_err(|_| BROKEN)?)
        };
        if is_good { Ok(()) } else { Err(FOREIGN) }
    }

    fn check_event(self, data: &[u8]) -> Result<(), &'static str> {
        if data == b"[DONE]" {
            return Ok(());
        }
        let fields: Fields = serde_json::from_slice(data).map_err(|_| "an event of broken JSON")?;
        let is_own = match self {
            Self::Choices => fields.choices.is_some(),
            Self::Responses | Self::Messages => fields.kind.is_some(),
            Self::Generate => fields.text.is_some() || fields.output_ids.is_some(),
        };
        if is_own || fields.error.is_some() {
            Ok(())
        } else {
            Err("an event without the fields of this API")
        }
    }
}

/// Returns the first field `data` of an event.
fn data_of(mut event: &[u8]) -> Option<&[u8]> {
    while !event.is_empty() {
        let (line, rest) = event.split_at(memchr(b'\n', event).map_or(event.len(), |end| end + 1));
        if let Some(data) = line.strip_prefix(b"data:") {
            return Some(data.trim_ascii());
        }
        event = rest;
    }
    None
}

/// Whether one value is a prefix of the other.
fn agree(one: &[u8], other: &[u8]) -> bool {
    one.iter().zip(other).all(|(one, other)| one == other)
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, header};

    use super::*;

    const EVENTS: Expect = Expect::Events(Api::Choices);
    const JSON: Expect = Expect::Json(Api::Choices);
    const BATCH: Expect = Expect::Json(Api::Generate);

    fn typed(content_type: &'static str) -> HeaderMap {
        [(header::CONTENT_TYPE, HeaderValue::from_static(content_type))].into_iter().collect()
    }

    #[test]
    fn valid_prefixes_are_valid_at_any_cut() {
        let good = [
            (EVENTS, "data: {}\n\n"),
            (EVENTS, ": ping\n\n"),
            (EVENTS, "\r\nevent: message\n"),
            (JSON, " \n{\"choices\":[]}"),
            (BATCH, "[{\"text\":\"\"}]"),
            (Expect::Anything, "<html>"),
        ];
        for (expect, text) in good {
            for cut in 1..=text.len() {
                assert_eq!(expect.check_start(&HeaderMap::new(), &text.as_bytes()[..cut]), Ok(()));
            }
            assert_eq!(expect.check_whole(text.as_bytes()), Ok(()), "{text}");
        }
        let streams = typed("Text/Event-Stream; charset=utf-8");
        assert_eq!(EVENTS.check_start(&streams, b"data: 1"), Ok(()));
    }

    #[test]
    fn garbage_is_invalid() {
        for (expect, text) in [
            (EVENTS, "<html>"),
            (EVENTS, "{\"choices\":[]}"),
            (EVENTS, "date: 1"),
            (EVENTS, ""),
            (JSON, "<html>"),
            (JSON, "data: {}\n\n"),
            (JSON, "[{}]"),
            (JSON, ""),
        ] {
            assert!(expect.check_start(&HeaderMap::new(), text.as_bytes()).is_err(), "{text:?}");
        }
        assert!(EVENTS.check_start(&typed("text/html"), b"data: 1").is_err());
        for text in ["{\"a\":", "{\"a\":1}}", "{garbage}", "   "] {
            assert!(JSON.check_whole(text.as_bytes()).is_err(), "{text:?}");
        }
    }
    #[test]
    fn an_answer_has_the_fields_of_its_api() {
        for (api, answer, event) in [
            (Api::Choices, r#"{"id":1,"choices":[{"index":0}]}"#, r#"{"choices":[]}"#),
            (Api::Responses, r#"{"output":[]}"#, r#"{"type":"response.created"}"#),
            (Api::Messages, r#"{"content":[]}"#, r#"{"type":"message_start"}"#),
            (Api::Generate, r#"{"text":"a"}"#, r#"{"output_ids":[1]}"#),
            (Api::Generate, r#"[{"text":"a"},{"output_ids":[1]}]"#, r#"{"text":["a"]}"#),
        ] {
            assert_eq!(Expect::Json(api).check_whole(answer.as_bytes()), Ok(()), "{answer}");
            let event = format!(":mla 0 1\nevent: x\r\ndata: {event}\r\n\r\n");
            assert_eq!(Expect::Events(api).check_event(event.as_bytes()), Ok(()), "{event}");
        }
        for text in [r#"{"hello":"world"}"#, r#"{"choices":null}"#, r#"{"choices":1}"#, "{}"] {
            for api in [Api::Choices, Api::Responses, Api::Messages, Api::Generate] {
                assert!(Expect::Json(api).check_whole(text.as_bytes()).is_err(), "{text}");
                let event = format!("data:{text}\n\n");
                assert!(Expect::Events(api).check_event(event.as_bytes()).is_err(), "{event}");
            }
        }
        assert!(BATCH.check_whole(br#"[{"text":"a"},{}]"#).is_err());
        for event in ["data: [DONE]\n\n", ": ping\n\n", "data: {\"error\":{}}\n\n", "\n"] {
            assert_eq!(EVENTS.check_event(event.as_bytes()), Ok(()), "{event}");
        }
    }
}
