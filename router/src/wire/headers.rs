//! Header fields that a proxy must not pass on.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use smallvec::SmallVec;

/// Hop-by-hop fields: RFC 9110 section 7.6.1, and older ones.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Prefix of the internal fields of router and workers. A client must not be able to send them.
const INTERNAL: &str = "x-mla-";

/// Internal fields that clients may send.
const CLIENT_FIELDS: [&str; 2] = ["x-mla-session", "x-mla-priority"];

/// The header field in which Anthropic's clients send their key.
pub const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Whether the content type is that of an event stream; `None` without a content type.
pub fn content_type_is_event_stream(headers: &HeaderMap) -> Option<bool> {
    let name = b"text/event-stream";
    let value = headers.get(header::CONTENT_TYPE)?.as_bytes();
    Some(value.get(..name.len()).is_some_and(|kind| kind.eq_ignore_ascii_case(name)))
}

/// Removes fields of a client that a worker must not get. The framing fields are removed as well: the worker gets a
/// content length that the router has counted, so the message has one reading.
pub fn for_worker(headers: &mut HeaderMap) {
    strip(headers);
    headers.remove(header::PROXY_AUTHORIZATION);
    headers.remove(header::EXPECT);
    headers.remove(header::CONTENT_LENGTH);
    // The router has checked the origin. A worker would compare it with its own name.
    headers.remove(header::ORIGIN);
    headers.remove("sec-fetch-site");
    // Usually there are none, and nothing is allocated.
    let internal: SmallVec<[HeaderName; 2]> = headers
        .keys()
        .filter(|name| name.as_str().starts_with(INTERNAL))
        .filter(|name| !CLIENT_FIELDS.contains(&name.as_str()))
        .cloned()
        .collect();
    for name in internal {
        headers.remove(name);
    }
}

/// Removes fields of a worker that a client must not get.
pub fn for_client(headers: &mut HeaderMap) {
    strip(headers);
}

fn strip(headers: &mut HeaderMap) {
    // The fields listed in `Connection` are hop-by-hop as well.
    let named: SmallVec<[HeaderName; 4]> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value: &HeaderValue| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn hop_by_hop_fields_are_removed_and_other_fields_are_kept() {
        let mut from_client = headers(&[
            ("connection", "keep-alive, X-Private"),
            ("connection", "x-other"),
            ("x-private", "1"),
            ("x-other", "2"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("expect", "100-continue"),
            ("proxy-authorization", "secret"),
            ("content-length", "3"),
            ("x-mla-replay", "1"),
            ("x-mla-cached-tokens", "9"),
            ("authorization", "Bearer x"),
            ("x-mla-session", "s"),
            ("x-mla-priority", "1"),
        ]);
        for_worker(&mut from_client);
        let expected = headers(&[
            ("authorization", "Bearer x"),
            ("x-mla-session", "s"),
            ("x-mla-priority", "1"),
        ]);
        assert_eq!(from_client, expected);
    }

    #[test]
    fn a_response_keeps_its_length() {
        let mut from_worker = headers(&[
            ("connection", "close"),
            ("content-length", "3"),
            ("x-mla-cached-tokens", "16"),
        ]);
        for_client(&mut from_worker);
        let expected = headers(&[("content-length", "3"), ("x-mla-cached-tokens", "16")]);
        assert_eq!(from_worker, expected);
    }
}
