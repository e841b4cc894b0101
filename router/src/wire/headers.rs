//! Header fields that a proxy must not pass on.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use smallvec::SmallVec;

/// Prefix of the internal fields of router and workers. A client must not be able to send them.
const INTERNAL: &str = "x-mla-";

/// Internal fields that clients may send.
const CLIENT_FIELDS: [&str; 2] = ["x-mla-session", "x-mla-priority"];

/// The header field in which Anthropic's clients send their key.
pub const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The first value of a field with a long name. Comparing the few names of a head takes less time than hashing this one.
pub fn find<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
    headers.iter().find_map(|(other, value)| (other == name).then_some(value))
}

/// Whether the content type is that of an event stream; `None` without a content type.
pub fn content_type_is_event_stream(headers: &HeaderMap) -> Option<bool> {
    let name = b"text/event-stream";
    let value = headers.get(header::CONTENT_TYPE)?.as_bytes();
    Some(value.get(..name.len()).is_some_and(|kind| kind.eq_ignore_ascii_case(name)))
}

/// Removes fields of a client that a worker must not get. The framing fields are removed as well: the worker gets a
/// content length that the router has counted, so the message has one reading.
pub fn for_worker(headers: &mut HeaderMap) {
    remove(headers, |name| match name {
        // The router has checked the origin. A worker would compare it with its own name.
        "proxy-authorization" | "expect" | "content-length" | "origin" | "sec-fetch-site" => true,
        name if name.starts_with(INTERNAL) => !CLIENT_FIELDS.contains(&name),
        name => is_hop_by_hop(name),
    });
}

/// Removes fields of a worker that a client must not get.
pub fn for_client(headers: &mut HeaderMap) {
    remove(headers, is_hop_by_hop);
}

/// Whether a field concerns one connection: RFC 9110 section 7.6.1, and older fields.
fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "proxy-connection"
            | "proxy-authenticate"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// Removes the fields whose name `is_removed` accepts, and the hop-by-hop fields that `Connection` lists. Passes over
/// the names once: a removal for each possible name would hash all of these names.
fn remove(headers: &mut HeaderMap, is_removed: impl Fn(&str) -> bool) {
    let mut removed: SmallVec<[HeaderName; 4]> =
        headers.keys().filter(|name| is_removed(name.as_str())).cloned().collect();
    if removed.contains(&header::CONNECTION) {
        let values = headers.get_all(header::CONNECTION).iter();
        let names = values
            .filter_map(|value: &HeaderValue| value.to_str().ok())
            .flat_map(|value| value.split(','));
        removed.extend(names.filter_map(|name| name.trim().parse::<HeaderName>().ok()));
    }
    for name in removed {
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
