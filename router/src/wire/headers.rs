//! Header fields that belong to one connection and must not travel through a proxy.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use smallvec::SmallVec;

/// RFC 9110 section 7.6.1, and what else describes only the connection it came on.
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

/// Fields with this prefix are between router and workers. A client's word in one of them would be
/// taken for the router's.
const INTERNAL: &str = "x-mla-";

/// In the heads of our workers' answers, which come when the prompt has been computed: its tokens,
pub const PROMPT_TOKENS: &str = "x-mla-prompt-tokens";

/// and those of them that were cached.
pub const CACHED_TOKENS: &str = "x-mla-cached-tokens";

/// Those that clients may use.
const FOR_CLIENTS: [&str; 2] = ["x-mla-session", "x-mla-priority"];

/// Whether a body is a stream of events, by what its headers say; `None` if they say nothing.
pub fn say_event_stream(headers: &HeaderMap) -> Option<bool> {
    let name = b"text/event-stream";
    let value = headers.get(header::CONTENT_TYPE)?.as_bytes();
    Some(value.get(..name.len()).is_some_and(|kind| kind.eq_ignore_ascii_case(name)))
}

/// A client's headers, made fit for a worker. The body is already read, so its framing goes too: the
/// worker gets a content length that the router has counted itself, which leaves no room for two
/// readings of one message.
pub fn for_worker(headers: &mut HeaderMap) {
    strip(headers);
    headers.remove(header::PROXY_AUTHORIZATION);
    headers.remove(header::EXPECT);
    headers.remove(header::CONTENT_LENGTH);
    // The router has judged which page may send what; a worker would judge by its own name.
    headers.remove(header::ORIGIN);
    headers.remove("sec-fetch-site");
    // Rare, so that collecting them costs nothing most of the time.
    let internal: SmallVec<[HeaderName; 2]> = headers
        .keys()
        .filter(|name| name.as_str().starts_with(INTERNAL))
        .filter(|name| !FOR_CLIENTS.contains(&name.as_str()))
        .cloned()
        .collect();
    for name in internal {
        headers.remove(name);
    }
}

/// A worker's headers, made fit for the client.
pub fn for_client(headers: &mut HeaderMap) {
    strip(headers);
}

fn strip(headers: &mut HeaderMap) {
    // The fields that `Connection` names are hop-by-hop as well. It is absent more often than not.
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
    fn hop_by_hop_fields_stay_behind_and_the_rest_travels() {
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
