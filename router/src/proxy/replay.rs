//! Whether a worker is asked to be ready to have its stream continued by another one, and the proof that it
//! is the router who asks the other one. How it is continued is the concern of `body`.

use std::fmt::Write as _;

use http::{HeaderName, HeaderValue};
use ring::hmac;

use crate::{
    config::{ApiKey, Config},
    endpoint::Endpoint,
    key::RouteKey,
};

/// Asks a worker to be ready, and is its answer that it is.
pub const HEADER: HeaderName = HeaderName::from_static("x-mla-replay");

/// What the request header says.
pub const ASK: HeaderValue = HeaderValue::from_static("1");

/// Signs a request that continues a stream. Workers refuse the field `continuation` without it.
pub const SIGNATURE: HeaderName = HeaderName::from_static("x-mla-signature");

/// Whether a broken answer to this request could be continued: workers would know that the router asks, it
/// streams tokens, and its body is a JSON object, which has room for one more field.
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

/// HMAC-SHA256 over the target (path and query) and the body, in hexadecimal.
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

    /// By Python: `hmac.new(b"k", b"/generate?a=1\n{}", "sha256").hexdigest()`.
    #[test]
    fn the_signature_is_the_one_that_workers_compute() {
        let key = "k".parse().expect("a key");
        assert_eq!(
            sign(&key, "/generate?a=1", b"{}"),
            "8ef53f3f76d0113de71c6795df7df3b2af34c93140d414be125c19189866f210"
        );
    }
}
