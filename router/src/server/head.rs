//! Checks the head of a request before hyper reads it.
//!
//! A message with two readings can smuggle a request past a proxy. hyper is lenient where HTTP allows it: it
//! accepts bare line feeds, prefers `Transfer-Encoding` to `Content-Length`, and requires no `Host`. Here a message
//! has exactly one reading or is refused, and the refusal has OpenAI's error shape.

use http::Uri;
use memchr::memchr;

use crate::error::Error;

/// Maximum size of a head, including the request line, in bytes.
pub(super) const MAX_HEAD: usize = 64 << 10;
const MAX_TARGET: usize = 8 << 10;
/// Maximum number of fields; hyper's limit.
const MAX_FIELDS: usize = 100;
const MAX_METHOD: usize = 32;

/// A complete head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// Its length in bytes, including the blank line.
    pub(super) end: usize,
    pub(super) body: BodyLength,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyLength {
    Exact(u64),
    Chunked,
}

/// Reads the head at the start of `bytes`. `None` if it is incomplete. Fails if it is ambiguous, malformed or too
/// large.
pub(super) fn read(bytes: &[u8]) -> Result<Option<Head>, Error> {
    let mut lines = Lines { bytes, at: 0 };
    // Old clients send an additional line break after a body. RFC 9112 says to ignore it.
    let request_line = loop {
        match lines.next()? {
            Some(b"") => {}
            Some(line) => break line,
            None => return Ok(None),
        }
    };
    let is_http_11 = request_line_version(request_line)?;
    let mut fields = Fields::default();
    loop {
        match lines.next()? {
            Some(b"") => break,
            Some(line) => fields.read(line)?,
            None => return Ok(None),
        }
    }
    Ok(Some(Head { end: lines.at, body: fields.body_length(is_http_11)? }))
}

/// Iterates over the complete lines, without their ends.
struct Lines<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Lines<'a> {
    fn next(&mut self) -> Result<Option<&'a [u8]>, Error> {
        let rest = &self.bytes[self.at..];
        let Some(length) = memchr(b'\n', rest) else {
            return if self.bytes.len() < MAX_HEAD { Ok(None) } else { Err(Error::HeadTooLarge) };
        };
        self.at += length + 1;
        if self.at > MAX_HEAD {
            return Err(Error::HeadTooLarge);
        }
        match rest[..length].strip_suffix(b"\r") {
            Some(line) => Ok(Some(line)),
            None => Err(Error::BadHead("a line must end with CR LF")),
        }
    }
}

/// Checks the request line. Returns whether its version is HTTP/1.1, and not 1.0.
fn request_line_version(line: &[u8]) -> Result<bool, Error> {
    let mut words = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Error::BadHead("the first line must be METHOD TARGET VERSION"));
    };
    if !(1..=MAX_METHOD).contains(&method.len()) || !method.iter().all(|byte| is_token(*byte)) {
        return Err(Error::BadHead("the method must be a word"));
    }
    if target.len() > MAX_TARGET {
        return Err(Error::UriTooLong { limit: MAX_TARGET });
    }
    let is_readable = match target {
        [b'/', ..] => target.iter().all(|byte| is_target(*byte)),
        b"*" => method == b"OPTIONS",
        // The absolute form, as for a forward proxy. It is rare, so parsing it twice does not matter.
        _ => Uri::try_from(target).is_ok_and(|uri| {
            uri.scheme().is_some() && uri.authority().is_some_and(|a| !a.as_str().contains('@'))
        }),
    };
    if !is_readable {
        return Err(Error::BadHead("the target must be a path or an absolute URI"));
    }
    match version {
        b"HTTP/1.1" => Ok(true),
        b"HTTP/1.0" => Ok(false),
        _ => Err(Error::BadHead("the version must be HTTP/1.1 or HTTP/1.0")),
    }
}

/// The fields that determine the end of the message and its host.
#[derive(Default)]
struct Fields {
    count: usize,
    hosts: usize,
    length: Option<u64>,
    is_chunked: bool,
}

impl Fields {
    fn read(&mut self, line: &[u8]) -> Result<(), Error> {
        self.count += 1;
        if self.count > MAX_FIELDS {
            return Err(Error::TooManyFields { limit: MAX_FIELDS });
        }
        // A line that starts with a space continues the previous one (obs-fold): it has no name and is refused.
        let colon = memchr(b':', line).unwrap_or(0);
        let (name, value) = (&line[..colon], line[colon..].get(1..).unwrap_or_default());
        if name.is_empty() || !name.iter().all(|byte| is_token(*byte)) {
            return Err(Error::BadHead("a field must be NAME: VALUE, without a space in its name"));
        }
        if name.contains(&b'_') {
            // CGI-like servers read an underscore as a dash, and so as another field.
            return Err(Error::BadHead("the name of a field must not contain an underscore"));
        }
        // Without an early exit, so that the compiler can vectorise the loop.
        let controls = value.iter().fold(false, |found, byte| found | is_control(*byte));
        if controls {
            return Err(Error::BadHead("a field must not contain control characters"));
        }
        let value = value.trim_ascii();
        match name.len() {
            4 if name.eq_ignore_ascii_case(b"host") => {
                self.hosts += 1;
                if !value.iter().all(|byte| is_host(*byte)) {
                    return Err(Error::BadHead("Host must be a name or an address"));
                }
            }
            14 if name.eq_ignore_ascii_case(b"content-length") => {
                // Up to 18 digits fit into u64.
                let is_number = (1..=18).contains(&value.len())
                    && value.iter().all(u8::is_ascii_digit)
                    && self.length.is_none();
                if !is_number {
                    return Err(Error::BadHead("Content-Length must be one number"));
                }
                self.length = Some(
                    value.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0')),
                );
            }
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                if self.is_chunked || !value.eq_ignore_ascii_case(b"chunked") {
                    return Err(Error::BadHead("Transfer-Encoding must be \"chunked\""));
                }
                self.is_chunked = true;
            }
            _ => {}
        }
        Ok(())
    }

    fn body_length(&self, is_http_11: bool) -> Result<BodyLength, Error> {
        match (self.hosts, is_http_11) {
            (1, _) | (0, false) => {}
            _ => return Err(Error::BadHead("there must be one Host")),
        }
        match (self.is_chunked, self.length) {
            (true, Some(_)) => Err(Error::AmbiguousLength),
            (true, None) if !is_http_11 => {
                Err(Error::BadHead("HTTP/1.0 knows no Transfer-Encoding"))
            }
            (true, None) => Ok(BodyLength::Chunked),
            (false, length) => Ok(BodyLength::Exact(length.unwrap_or(0))),
        }
    }
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// The characters of URIs, and some that clients often forget to escape.
fn is_target(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~:/?[]@!$&'()*+,;=%{}|".contains(&byte)
}

/// The characters of a name or an address with a port. A path, query or user is refused.
fn is_host(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~:[]!$&'()*+;=%".contains(&byte)
}

fn is_control(byte: u8) -> bool {
    byte < b' ' && byte != b'\t' || byte == 0x7f
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(head: &str) -> Result<Option<Head>, Error> {
        read(head.as_bytes())
    }

    fn with(fields: &str) -> Result<Option<Head>, Error> {
        read_text(&format!("POST /generate HTTP/1.1\r\nHost: x\r\n{fields}\r\n"))
    }

    fn body(fields: &str) -> BodyLength {
        with(fields).expect("one reading").expect("whole").body
    }

    #[test]
    fn a_valid_head_is_read_to_its_end_in_any_pieces() {
        let head = "\r\nPOST /v1/x?a={%20}&b=c|d HTTP/1.1\r\nhOST: [::1]:80\r\nAccept:\r\n\
                    X: \t caf\u{e9} \r\nCONTENT-length: 10 \r\n\r\n";
        let whole = Head { end: head.len(), body: BodyLength::Exact(10) };
        assert_eq!(read_text(&format!("{head}0123456789GET")), Ok(Some(whole)));
        for cut in 0..head.len() {
            let Some(part) = head.get(..cut) else { continue };
            assert_eq!(read_text(part), Ok(None), "{part:?}");
        }
        assert_eq!(body(""), BodyLength::Exact(0));
        assert_eq!(body("Transfer-Encoding: CHUNKED\r\n"), BodyLength::Chunked);
        for head in ["GET / HTTP/1.0\r\n\r\n", "OPTIONS * HTTP/1.1\r\nhost:\r\n\r\n"] {
            assert!(read_text(head).expect(head).is_some());
        }
        assert!(read_text("GET http://a.b:1/x HTTP/1.1\r\nhost: a.b:1\r\n\r\n").is_ok());
    }

    #[test]
    fn an_ambiguous_head_is_refused() {
        for fields in [
            "content-length: 4\r\ntransfer-encoding: chunked\r\n",
            "transfer-encoding: chunked\r\ncontent-length: 4\r\n",
        ] {
            assert_eq!(with(fields), Err(Error::AmbiguousLength), "{fields:?}");
        }
        for fields in [
            "content-length: 4\r\ncontent-length: 4\r\n",
            "content-length: 4, 4\r\n",
            "content-length: +4\r\n",
            "content-length: 0x4\r\n",
            "content-length: 4 4\r\n",
            "content-length:\r\n",
            "content-length: 9999999999999999999\r\n",
            "content-length : 4\r\n",
            "content_length: 4\r\n",
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
            "transfer-encoding: chunked, identity\r\n",
            "transfer-encoding: identity, chunked\r\n",
            "transfer-encoding: xchunked\r\n",
            "transfer-encoding: \"chunked\"\r\n",
            "transfer-encoding: \u{b}chunked\r\n",
            " transfer-encoding: chunked\r\n",
            "x: y\r\n transfer-encoding: chunked\r\n",
            "x: y\r\n\tz\r\n",
            "x: y\nz: 1\r\n",
            "x: y\rz: 1\r\n",
            "x: \0\r\n",
            "x\r\n",
            ": x\r\n",
            "host: y\r\n",
            "\u{e9}: x\r\n",
        ] {
            assert!(matches!(with(fields), Err(Error::BadHead(_))), "{fields:?}");
        }
    }

    #[test]
    fn a_malformed_first_line_or_host_is_refused() {
        for head in [
            "GET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nhost: a/?x=\r\n\r\n",
            "GET / HTTP/1.1\r\nhost: a@b\r\n\r\n",
            "GET / HTTP/1.1\r\nhost: a, b\r\n\r\n",
            "GET / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n",
            "GET  / HTTP/1.1\r\nhost: x\r\n\r\n",
            "GET / HTTP/1.1 \r\nhost: x\r\n\r\n",
            "GET /\r\nhost: x\r\n\r\n",
            "GET / HTTP/1.2\r\nhost: x\r\n\r\n",
            "GET / http/1.1\r\nhost: x\r\n\r\n",
            "PRI * HTTP/2.0\r\n\r\n",
            "G(T / HTTP/1.1\r\nhost: x\r\n\r\n",
            "GET /\t HTTP/1.1\r\nhost: x\r\n\r\n",
            "GET /a#b HTTP/1.1\r\nhost: x\r\n\r\n",
            "GET /\u{e9} HTTP/1.1\r\nhost: x\r\n\r\n",
            "GET a HTTP/1.1\r\nhost: x\r\n\r\n",
            "GET * HTTP/1.1\r\nhost: x\r\n\r\n",
            "GET http://u@a/ HTTP/1.1\r\nhost: a\r\n\r\n",
            "CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n",
            "\n\nGET / HTTP/1.1\r\nhost: x\r\n\r\n",
            "\u{16}\u{3}\u{1}\u{2}\n",
        ] {
            assert!(matches!(read_text(head), Err(Error::BadHead(_))), "{head:?}");
        }
    }

    #[test]
    fn limits_apply_before_the_head_is_complete() {
        let long = "x".repeat(MAX_HEAD);
        assert_eq!(read_text(&long), Err(Error::HeadTooLarge));
        assert_eq!(read_text(&long[1..]), Ok(None));
        assert_eq!(with(&format!("x: {long}\r\n")), Err(Error::HeadTooLarge));
        let target = &long[..=MAX_TARGET];
        let head = format!("GET /{target} HTTP/1.1\r\n");
        assert_eq!(read_text(&head), Err(Error::UriTooLong { limit: MAX_TARGET }));
        let many = Err(Error::TooManyFields { limit: MAX_FIELDS });
        assert_eq!(with(&"x: y\r\n".repeat(MAX_FIELDS)), many);
        assert!(with(&"x: y\r\n".repeat(MAX_FIELDS - 1)).is_ok());
    }

    /// Otherwise hyper would refuse the request in another shape.
    #[test]
    fn hyper_accepts_every_target_that_passes() {
        for byte in (0..=255).filter(|byte| is_target(*byte)) {
            let target = [b'/', byte, b'?', byte];
            assert!(Uri::try_from(&target[..]).is_ok(), "{:?}", char::from(byte));
        }
    }
}
