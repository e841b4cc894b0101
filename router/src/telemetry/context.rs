//! W3C trace context: the trace of a request, in the header `traceparent`.

use http::{HeaderMap, HeaderValue};

/// The header with the trace context, from clients and to workers.
pub const HEADER: &str = "traceparent";

/// The trace id, parent span and own span of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    pub trace: u128,
    /// The client's span; zero if it has none.
    pub parent: u64,
    pub span: u64,
}

impl TraceContext {
    /// Reads the context from `headers`, or starts a new trace. `None` if the client does not sample the trace.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let named = headers.get(HEADER).and_then(|value| parse(value.as_bytes()));
        let (trace, parent, sampled) = named.unwrap_or_else(|| (fastrand::u128(1..), 0, true));
        sampled.then(|| Self { trace, parent, span: new_span() })
    }

    /// The `traceparent` header for a worker whose spans are children of `span`.
    pub fn header(&self, span: u64) -> HeaderValue {
        let text = format!("00-{:032x}-{span:016x}-01", self.trace);
        HeaderValue::try_from(text).expect("contract: digits and dashes")
    }
}

/// Returns a random span id, never 0.
pub fn new_span() -> u64 {
    fastrand::u64(1..)
}

/// Parses a `traceparent`: trace id, span id, and whether the trace is sampled. `None` if it is malformed.
fn parse(text: &[u8]) -> Option<(u128, u64, bool)> {
    let text = std::str::from_utf8(text).ok()?;
    let mut parts = text.splitn(4, '-');
    let mut field = |length: usize| {
        let hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        parts.next().filter(|part| part.len() == length && part.bytes().all(hex))
    };
    let (version, trace, span) = (field(2)?, field(32)?, field(16)?);
    let flags = parts.next()?;
    // A later version may have more fields after the flags; version 00 must not.
    let (flags, rest) = flags.split_at_checked(2)?;
    if version == "ff" || (version == "00" && !rest.is_empty()) {
        return None;
    }
    let trace = u128::from_str_radix(trace, 16).ok().filter(|trace| *trace > 0)?;
    let span = u64::from_str_radix(span, 16).ok().filter(|span| *span > 0)?;
    Some((trace, span, u8::from_str_radix(flags, 16).ok()? & 1 == 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENTS: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn of(value: &str) -> Option<TraceContext> {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, value.parse().expect("a header value"));
        TraceContext::of(&headers)
    }

    #[test]
    fn the_trace_of_the_client_is_continued() {
        let context = of(CLIENTS).expect("recorded");
        assert_eq!(context.trace, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!(context.parent, 0x00f0_67aa_0ba9_02b7);
        let header = context.header(7);
        assert_eq!(header, "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000007-01");
        assert_eq!(of(&CLIENTS.replace("-01", "-00")), None, "the client does not want it");
        assert!(of(&CLIENTS.replace("00-4", "01-4").replace("-01", "-01-more")).is_some());
    }

    #[test]
    fn a_malformed_context_starts_a_new_trace() {
        let zeros = "0".repeat(32);
        for bad in [
            "",
            "00",
            "junk",
            &CLIENTS.to_uppercase(),
            &CLIENTS.replace("-01", ""),
            &CLIENTS.replace("-01", "-01-more"),
            &CLIENTS.replace("-01", "-0"),
            &CLIENTS.replace("00-4", "ff-4"),
            &CLIENTS.replace("4bf92f3577b34da6a3ce929d0e0e4736", &zeros),
            &CLIENTS.replace("00f067aa0ba902b7", &zeros[..16]),
        ] {
            let context = of(bad).expect("recorded");
            assert_eq!(context.parent, 0, "{bad}");
            assert_ne!((context.trace, context.span), (0, 0));
        }
    }
}
