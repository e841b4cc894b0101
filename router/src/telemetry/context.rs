//! W3C trace context: which trace a request belongs to, in the header `traceparent`.

use http::{HeaderMap, HeaderValue};

/// Where client, router and workers name the trace.
pub const HEADER: &str = "traceparent";

/// The span of a request, and its place in a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    pub trace: u128,
    /// The client's span; zero if it has none.
    pub parent: u64,
    pub span: u64,
}

impl TraceContext {
    /// As the client has it, or anew. `None` if the client says that it is not recorded.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let named = headers.get(HEADER).and_then(|value| parse(value.as_bytes()));
        let (trace, parent, sampled) = named.unwrap_or_else(|| (fastrand::u128(1..), 0, true));
        sampled.then(|| Self { trace, parent, span: new_span() })
    }

    /// What a worker is told: its spans belong below `span`.
    pub fn header(&self, span: u64) -> HeaderValue {
        let text = format!("00-{:032x}-{span:016x}-01", self.trace);
        HeaderValue::try_from(text).expect("contract: digits and dashes")
    }
}

/// A name for a span that no other has.
pub fn new_span() -> u64 {
    fastrand::u64(1..)
}

/// Trace, span, and whether it is recorded.
fn parse(text: &[u8]) -> Option<(u128, u64, bool)> {
    let text = std::str::from_utf8(text).ok()?;
    let mut parts = text.splitn(4, '-');
    let mut field = |length: usize| {
        let hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        parts.next().filter(|part| part.len() == length && part.bytes().all(hex))
    };
    let (version, trace, span) = (field(2)?, field(32)?, field(16)?);
    let flags = parts.next()?;
    // A later version may say more after the flags; this one must not.
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
    fn a_clients_trace_goes_on() {
        let context = of(CLIENTS).expect("recorded");
        assert_eq!(context.trace, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!(context.parent, 0x00f0_67aa_0ba9_02b7);
        let header = context.header(7);
        assert_eq!(header, "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000007-01");
        assert_eq!(of(&CLIENTS.replace("-01", "-00")), None, "the client does not want it");
        assert!(of(&CLIENTS.replace("00-4", "01-4").replace("-01", "-01-more")).is_some());
    }

    #[test]
    fn what_cannot_be_read_is_a_new_trace() {
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
