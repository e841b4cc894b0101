//! The id of a request: the client's, or a new one. Worker, client, log lines and traces get it.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::{config::HeaderField, wire::headers::find};

pub const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// Maximum length of an id in bytes.
const MAX_BYTES: usize = 128;

/// Returns the id in the first of `fields` that has a valid one, or a new id. An id with spaces or non-ASCII
/// characters, or one that is too long, is invalid: it goes into log lines.
pub fn choose(fields: &[HeaderField], headers: &HeaderMap) -> HeaderValue {
    let sent = fields.iter().filter_map(|field| find(headers, field.name()));
    sent.into_iter().find(|id| is_word(id.as_bytes())).cloned().unwrap_or_else(random)
}

fn is_word(id: &[u8]) -> bool {
    (1..=MAX_BYTES).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
}

/// Returns a random UUID (version 4), without an allocation for a string.
fn random() -> HeaderValue {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    /// The place of the two digits of each byte.
    const PLACES: [usize; 16] = [0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34];
    let bits = fastrand::u128(..) & !(0xf << 76) & !(0xc << 60) | (0x4 << 76) | (0x8 << 60);
    let mut text = [b'-'; 36];
    for (byte, place) in bits.to_be_bytes().into_iter().zip(PLACES) {
        text[place] = HEX[usize::from(byte >> 4)];
        text[place + 1] = HEX[usize::from(byte & 0xf)];
    }
    HeaderValue::from_bytes(&text).expect("contract: hex digits and dashes are visible ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(lines: &[(&'static str, &'static [u8])]) -> HeaderValue {
        let fields: Vec<HeaderField> =
            ["x-request-id", "x-correlation-id"].map(|name| name.parse().expect("a name")).into();
        let headers = lines.iter().map(|(name, value)| {
            (HeaderName::from_static(name), HeaderValue::from_bytes(value).expect("a value"))
        });
        choose(&fields, &headers.collect())
    }

    #[test]
    fn the_id_of_the_client_is_used_in_the_order_of_the_setting() {
        assert_eq!(chosen(&[("x-correlation-id", b"c"), ("x-request-id", b"r")]), "r");
        assert_eq!(chosen(&[("x-correlation-id", b"c")]), "c");
        assert_eq!(chosen(&[("x-request-id", b""), ("x-correlation-id", b"c")]), "c");
    }

    #[test]
    fn an_invalid_id_is_replaced_by_a_uuid() {
        const LONG: [u8; 129] = [b'x'; 129];
        for id in [&b"two words"[..], b"tab\there", b"\x9b31m", &LONG] {
            let made = chosen(&[("x-request-id", id)]);
            let text = made.to_str().expect("ASCII");
            assert_eq!(text.len(), 36);
            assert_eq!(text.as_bytes()[14], b'4', "{text}");
            assert!(matches!(text.as_bytes()[19], b'8'..=b'b'), "{text}");
            let groups: Vec<usize> = text.split('-').map(str::len).collect();
            assert_eq!(groups, [8, 4, 4, 4, 12]);
        }
        assert_ne!(chosen(&[]), chosen(&[]));
    }
}
