//! Probes: light requests for the state of the router, recognized by the first bytes of a connection.

/// Paths of probes. The answer needs no worker and little time. `/metrics` is not a probe, because with hundreds of
/// workers it has hundreds of kilobytes.
const PATHS: [&[u8]; 4] = [b"/health", b"/health_generate", b"/liveness", b"/readiness"];

/// Length of a prefix that contains the path of any probe.
pub(super) const LONGEST: usize = 32;

/// Whether a connection with these first bytes requests one of [`PATHS`].
pub(super) fn is_probe(first: &[u8]) -> bool {
    let Some(target) = first.strip_prefix(b"GET ") else { return false };
    let end = target.iter().position(|byte| matches!(byte, b' ' | b'?'));
    end.is_some_and(|end| PATHS.contains(&&target[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_is_recognized_by_its_path() {
        for first in ["GET /health HTTP/1.1\r\n", "GET /readiness?a HTTP/1.0\r\n", "GET /liveness "]
        {
            assert!(is_probe(first.as_bytes()), "{first}");
        }
        for first in ["", "GET /health", "GET /metrics HTTP/1.1", "POST /health HTTP/1.1"] {
            assert!(!is_probe(first.as_bytes()), "{first}");
        }
        let longest = PATHS.iter().map(|path| path.len()).max().expect("a path");
        assert!("GET ".len() + longest < LONGEST);
    }
}
