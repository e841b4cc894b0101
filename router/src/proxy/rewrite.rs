//! Bodies that have a field more than the client's.

use bytes::{Bytes, BytesMut};

use super::Job;
use crate::{
    endpoint::Endpoint,
    fleet::worker::{Runtime, Worker},
};

/// Has an engine end its stream with an event that tells the prompt's tokens.
const INCLUDE_USAGE: &[u8] = br#""stream_options":{"include_usage":true}"#;

/// A longer body is not copied for that.
const MOST_COPIED: usize = 1 << 20;

/// `body` with one more field, which is given as `"name":value`. `None` if it does not end as a JSON object
/// does.
pub fn with_field(body: &[u8], field: &[u8]) -> Option<Bytes> {
    let fields = body.trim_ascii_end().strip_suffix(b"}")?.trim_ascii_end();
    let mut whole = BytesMut::with_capacity(fields.len() + field.len() + 2);
    whole.extend_from_slice(fields);
    if !fields.ends_with(b"{") {
        whole.extend_from_slice(b",");
    }
    whole.extend_from_slice(field);
    whole.extend_from_slice(b"}");
    Some(whole.freeze())
}

/// The body that asks `worker` for its counts, where its streams have none without being asked and the
/// client has left that open. Our workers have told them in the head of the response.
pub(super) fn asking_usage(job: &Job, worker: &Worker) -> Option<Bytes> {
    let key = job.key.as_ref().filter(|key| key.stream && !key.has_stream_options)?;
    let is_openai = matches!(job.endpoint, Endpoint::ChatCompletions | Endpoint::Completions);
    let understands = matches!(worker.info.load().runtime, Some(Runtime::Sglang | Runtime::Vllm));
    let body = &job.request.body;
    let is_asked = is_openai && understands && !key.continues && body.len() <= MOST_COPIED;
    is_asked.then(|| with_field(body, INCLUDE_USAGE)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_more_than_the_clients() {
        for (body, whole) in [
            ("{}", r#"{"a":1}"#),
            (r#"{"b":"}"}"#, r#"{"b":"}","a":1}"#),
            ("\n{ \"b\": true }\r\n ", "\n{ \"b\": true,\"a\":1}"),
        ] {
            let made = with_field(body.as_bytes(), br#""a":1"#);
            assert_eq!(made.as_deref(), Some(whole.as_bytes()));
        }
        assert_eq!(with_field(b"[]", br#""a":1"#), None);
    }
}
