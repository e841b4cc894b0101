//! The headers by which a broken stream is continued on another worker, and the signature of such a request.
//!
//! The router asks a worker with [`HEADER`] to make its stream continuable. Another worker continues a stream only
//! for a request with a valid [`SIGNATURE`]: a client could otherwise put tokens into an answer. `body::replay`
//! keeps the state.

use std::fmt::Write as _;

use http::{HeaderName, HeaderValue};
use ring::hmac;

use crate::{
    config::{ApiKey, Config},
    endpoint::Endpoint,
    key::RouteKey,
};

/// Request header: asks the worker for a continuable stream. Response header: an opaque value, sent back to the worker
/// that continues.
pub const HEADER: HeaderName = HeaderName::from_static("x-mla-replay");

/// Value of the request header.
pub const ASK: HeaderValue = HeaderValue::from_static("1");

/// Request header with the signature of a continuation. Workers refuse the field `continuation` without it.
pub const SIGNATURE: HeaderName = HeaderName::from_static("x-mla-signature");

/// Whether the stream of this request could be continued: the router has a key, the answer is a stream of tokens,
/// and the body is a JSON object, to which a field can be added.
pub fn is_possible(
    config: &Config,
    endpoint: Endpoint,
    key: Option<&RouteKey>,
    body: &[u8],
) -> bool {
    !config.disable_replay
        && config.replay_key.is_some()
        && endpoint.generates()
        && key.is_some_and(|key| key.stream)
        && body.trim_ascii_end().ends_with(b"}")
}

/// Returns the HMAC-SHA256 of target (path and query), line feed and body, in hexadecimal digits.
pub fn sign(key: &ApiKey, target: &str, body: &[u8]) -> HeaderValue {
    let mut signing = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes()));
    signing.update(target.as_bytes());
    signing.update(b"\n");
    signing.update(body);
    let tag = signing.sign();
    let hex = tag.as_ref().iter().fold(String::with_capacity(64), |mut hex, byte| {
        // Writing to a string cannot fail.
        let _written = write!(hex, "{byte:02x}");
        hex
    });
    HeaderValue::try_from(hex).expect("contract: hexadecimal digits are visible ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed in Python: `hmac.new(b"k", b"/generate?a=1\n{}", "sha256").hexdigest()`.
    #[test]
    fn the_signature_is_the_one_that_workers_compute() {
        let key = "k".parse().expect("a key");
        assert_eq!(
            sign(&key, "/generate?a=1", b"{}"),
            "8ef53f3f76d0113de71c6795df7df3b2af34c93140d414be125c19189866f210"
        );
    }
}
