//! Adds a field to a JSON body without parsing it.

use bytes::{Bytes, BytesMut};

/// Returns `body` with one more field at its end. `field` is written as `"name":value`. `None` if `body` does not end
/// like a JSON object.
pub(crate) fn with_field(body: &[u8], field: &[u8]) -> Option<Bytes> {
    let fields = body.trim_ascii_end().strip_suffix(b"}")?.trim_ascii_end();
    let mut whole = BytesMut::with_capacity(fields.len() + field.len() + 2);
    whole.extend_from_slice(fields);
    if !fields.ends_with(b"{") {
        whole.extend_from_slice(b",");
    }
    whole.extend_from_slice(field);
    whole.extend_from_slice(b"}");
    Some(whole.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_is_added_at_the_end() {
        for (body, whole) in [
            ("{}", r#"{"a":1}"#),
            (r#"{"b":"}"}"#, r#"{"b":"}","a":1}"#),
            ("\n{ \"b\": true }\r\n ", "\n{ \"b\": true,\"a\":1}"),
        ] {
            let made = with_field(body.as_bytes(), br#""a":1"#);
            assert_eq!(made.as_deref(), Some(whole.as_bytes()));
        }
        assert_eq!(with_field(b"[]", br#""a":1"#), None);
    }
}
