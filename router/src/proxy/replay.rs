//! Whether a worker is asked to be ready to have its stream continued by another one. How it is
//! continued is the concern of `body`.

use http::{HeaderName, HeaderValue};

use crate::{config::Config, endpoint::Endpoint, key::RouteKey};

/// Asks a worker to be ready, and is its answer that it is.
pub const HEADER: HeaderName = HeaderName::from_static("x-mla-replay");

/// What the request header says.
pub const ASK: HeaderValue = HeaderValue::from_static("1");

/// Whether a broken answer to this request could be continued: it streams tokens, and its body is a
/// JSON object, which has room for one more field.
pub fn is_possible(
    config: &Config,
    endpoint: Endpoint,
    key: Option<&RouteKey>,
    body: &[u8],
) -> bool {
    !config.disable_replay
        && endpoint.generates()
        && key.is_some_and(|key| key.stream)
        && body.trim_ascii_end().ends_with(b"}")
}
