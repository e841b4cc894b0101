//! The head of a request.
//!
//! An ambiguous message can smuggle a request past a proxy. HTTP allows a server to be lenient: to accept bare line
//! feeds, to prefer `Transfer-Encoding` to `Content-Length`. This module refuses every ambiguous message, with an error
//! in OpenAI's shape. httparse finds the parts of a head; the checks are here.

use std::mem::MaybeUninit;

use bytes::Bytes;
use http::{Method, Uri, Version, request::Parts};
use httparse::{Header, Request, Status};
use memchr::memchr_iter;

use crate::{
    error::Error,
    heap::boxed,
    wire::http1::{ConnectionOptions, number, to_map},
};

/// Maximum size of a head, including the request line, in bytes.
pub(super) const MAX_HEAD: usize = 64 << 10;
const MAX_TARGET: usize = 8 << 10;
/// Maximum number of fields.
const MAX_FIELDS: usize = 100;
const MAX_METHOD: usize = 32;

/// Room for the fields that the router adds: the id of the request and the trace.
const ROOM: usize = 2;

/// A complete head.
pub(super) struct Head {
    /// Boxed, because they are large and passed on.
    pub(super) parts: Box<Parts>,
    pub(super) body: BodyLength,
    /// Whether the client waits for a 100 (Continue) before it sends the body.
    pub(super) expects_continue: bool,
    /// Whether the client allows another request on the connection.
    pub(super) keeps_alive: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyLength {
    Exact(u64),
    Chunked,
}

/// Reads the head at the start of `unread`, and leaves the bytes after it there. `None` if it is incomplete. Fails if
/// it is ambiguous, malformed or too large.
pub(super) fn read(unread: &mut Bytes) -> Result<Option<Head>, Error> {
    let bytes = &unread[..];
    let mut fields = [const { MaybeUninit::uninit() }; MAX_FIELDS];
    let mut request = Request::new(&mut []);
    let parsed = request.parse_with_uninit_headers(bytes, &mut fields).map_err(refusal)?;
    if request.path.is_some_and(|target| target.len() > MAX_TARGET) {
        return Err(Error::UriTooLong { limit: MAX_TARGET });
    }
    let end = match parsed {
        Status::Complete(end) if end <= MAX_HEAD => end,
        Status::Partial if bytes.len() < MAX_HEAD => return Ok(None),
        _ => return Err(Error::HeadTooLarge),
    };
    let is_bare = |at: usize| at == 0 || bytes[at - 1] != b'\r';
    if memchr_iter(b'\n', &bytes[..end]).any(is_bare) {
        return Err(Error::BadHead(LINE_END));
    }
    check_request_line(&request)?;
    let version = request.version.unwrap_or_default();
    let fields = Fields::read(request.headers)?;
    let body = fields.body_length(version == 1)?;
    let expects_continue = version == 1 && fields.expects_continue;
    let keeps_alive = fields.options.keeps_alive(version);
    let parts = to_parts(&request, unread)?;
    drop(unread.split_to(end));
    Ok(Some(Head { parts, body, expects_continue, keeps_alive }))
}

/// The parts of a checked request. Its target and the values of its fields stay in `bytes`, where they were parsed.
fn to_parts(request: &Request<'_, '_>, bytes: &Bytes) -> Result<Box<Parts>, Error> {
    let mut parts = boxed(|| http::Request::new(()).into_parts().0);
    let method = request.method.unwrap_or_default();
    parts.method =
        Method::from_bytes(method.as_bytes()).map_err(|_| Error::BadHead("a malformed method"))?;
    let target = bytes.slice_ref(request.path.unwrap_or_default().as_bytes());
    parts.uri = Uri::from_maybe_shared(target).map_err(|_| Error::BadHead(TARGET))?;
    parts.version = if request.version == Some(1) { Version::HTTP_11 } else { Version::HTTP_10 };
    // A worker gets the length of the body that the router has read, so this one would only be removed again.
    let kept = |field: &&Header<'_>| !field.name.eq_ignore_ascii_case("content-length");
    let capacity = request.headers.len() + ROOM;
    let headers = to_map(request.headers.iter().filter(kept), bytes, capacity);
    parts.headers = headers.map_err(Error::BadHead)?;
    Ok(parts)
}

const LINE_END: &str = "a line must end with CR LF";
const TARGET: &str = "the target must be a path or an absolute URI";

/// The error for a head that httparse refuses.
fn refusal(error: httparse::Error) -> Error {
    use httparse::Error as Cause;
    Error::BadHead(match error {
        Cause::TooManyHeaders => return Error::TooManyFields { limit: MAX_FIELDS },
        Cause::HeaderName => "a field must be NAME: VALUE, without a space in its name",
        Cause::HeaderValue => "a field must not contain control characters",
        Cause::NewLine => LINE_END,
        Cause::Version => "the version must be HTTP/1.1 or HTTP/1.0",
        Cause::Token | Cause::Status => "the first line must be METHOD TARGET VERSION",
    })
}

fn check_request_line(request: &Request<'_, '_>) -> Result<(), Error> {
    let (method, target) =
        (request.method.unwrap_or_default(), request.path.unwrap_or_default().as_bytes());
    if method.len() > MAX_METHOD {
        return Err(Error::BadHead("the method must be a word"));
    }
    let is_readable = match target {
        [b'/', ..] => target.iter().all(|byte| is_target(*byte)),
        b"*" => method == "OPTIONS",
        // The absolute form, as for a forward proxy. It is rare, so parsing it twice does not matter.
        _ => Uri::try_from(target).is_ok_and(|uri| {
            uri.scheme().is_some() && uri.authority().is_some_and(|a| !a.as_str().contains('@'))
        }),
    };
    if is_readable { Ok(()) } else { Err(Error::BadHead(TARGET)) }
}

/// The fields that determine the end of the message, its host, and the use of the connection.
#[derive(Default)]
struct Fields {
    hosts: usize,
    length: Option<u64>,
    is_chunked: bool,
    expects_continue: bool,
    options: ConnectionOptions,
}

impl Fields {
    fn read(fields: &[Header<'_>]) -> Result<Self, Error> {
        let mut read = Self::default();
        for Header { name, value } in fields {
            if name.contains('_') {
                // CGI-like servers read an underscore as a dash, so the name would mean another field.
                return Err(Error::BadHead("the name of a field must not contain an underscore"));
            }
            match name.len() {
                4 if name.eq_ignore_ascii_case("host") => read.host(value)?,
                6 if name.eq_ignore_ascii_case("expect") => {
                    read.expects_continue = value.eq_ignore_ascii_case(b"100-continue");
                }
                10 if name.eq_ignore_ascii_case("connection") => read.options.read(value),
                14 if name.eq_ignore_ascii_case("content-length") => read.content_length(value)?,
                17 if name.eq_ignore_ascii_case("transfer-encoding") => {
                    read.transfer_encoding(value)?;
                }
                _ => {}
            }
        }
        Ok(read)
    }

    fn host(&mut self, value: &[u8]) -> Result<(), Error> {
        self.hosts += 1;
        if value.iter().all(|byte| is_host(*byte)) {
            Ok(())
        } else {
            Err(Error::BadHead("Host must be a name or an address"))
        }
    }

    fn content_length(&mut self, value: &[u8]) -> Result<(), Error> {
        let length = number(value).filter(|_| self.length.is_none());
        self.length = Some(length.ok_or(Error::BadHead("Content-Length must be one number"))?);
        Ok(())
    }

    fn transfer_encoding(&mut self, value: &[u8]) -> Result<(), Error> {
        if self.is_chunked || !value.eq_ignore_ascii_case(b"chunked") {
            return Err(Error::BadHead("Transfer-Encoding must be \"chunked\""));
        }
        self.is_chunked = true;
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

/// The characters of URIs, and some that clients often forget to escape.
fn is_target(byte: u8) -> bool {
    const ALLOWED: [bool; 256] = with_alphanumeric(b"-._~:/?[]@!$&'()*+,;=%{}|");
    ALLOWED[usize::from(byte)]
}

/// The characters of a name or an address with a port. A path, query or user is refused.
fn is_host(byte: u8) -> bool {
    const ALLOWED: [bool; 256] = with_alphanumeric(b"-._~:[]!$&'()*+;=%");
    ALLOWED[usize::from(byte)]
}

/// The set of ASCII letters, digits and `others`.
const fn with_alphanumeric(others: &[u8]) -> [bool; 256] {
    let mut set = [false; 256];
    let mut byte = 0;
    while byte < 128 {
        set[byte] = (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    let mut index = 0;
    while index < others.len() {
        set[others[index] as usize] = true;
        index += 1;
    }
    set
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    /// The length of the head and of its body.
    type Read = Result<Option<(usize, BodyLength)>, Error>;

    fn read_text(text: &str) -> Read {
        let mut unread = Bytes::copy_from_slice(text.as_bytes());
        let head = read(&mut unread)?;
        Ok(head.map(|head| (text.len() - unread.len(), head.body)))
    }

    fn with(fields: &str) -> Read {
        read_text(&format!("POST /generate HTTP/1.1\r\nHost: x\r\n{fields}\r\n"))
    }

    fn body(fields: &str) -> BodyLength {
        with(fields).expect("one reading").expect("whole").1
    }

    /// The complete head of a request with these fields.
    fn head(version: &str, fields: &str) -> Head {
        let text = format!("POST /v1/x?y=1 HTTP/{version}\r\nhost: x\r\n{fields}\r\n");
        read(&mut Bytes::from(text)).expect("one reading").expect("whole")
    }

    #[test]
    fn a_valid_head_is_read_to_its_end_in_any_pieces() {
        let head = "\r\nPOST /v1/x?a={%20}&b=c|d HTTP/1.1\r\nhOST: [::1]:80\r\nAccept:\r\n\
                    X: \t caf\u{e9} \r\nCONTENT-length: 10 \r\n\r\n";
        let whole = (head.len(), BodyLength::Exact(10));
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
    fn the_parts_of_a_head_are_those_that_were_sent() {
        let Parts { method, uri, version, headers, .. } =
            *head("1.1", "X-A:  caf\u{e9} \r\nx-a:\r\n").parts;
        assert_eq!((method, version), (Method::POST, Version::HTTP_11));
        assert_eq!(uri, "/v1/x?y=1");
        let values: Vec<_> = headers.get_all("x-a").iter().map(HeaderValue::as_bytes).collect();
        assert_eq!(values, ["caf\u{e9}".as_bytes(), b""]);
        assert_eq!((headers.len(), &headers["host"]), (3, &"x".parse().expect("a value")));
        assert_eq!(head("1.0", "").parts.version, Version::HTTP_10);
    }

    #[test]
    fn the_client_decides_whether_the_connection_stays_open() {
        for (version, fields, keeps) in [
            ("1.1", "", true),
            ("1.1", "connection: x, Close\r\n", false),
            ("1.1", "connection: keep-alive\r\nconnection: close\r\n", false),
            ("1.0", "", false),
            ("1.0", "connection: Keep-Alive\r\n", true),
        ] {
            assert_eq!(head(version, fields).keeps_alive, keeps, "{version} {fields:?}");
        }
        for (version, expects) in [("1.1", true), ("1.0", false)] {
            let head = head(version, "expect: 100-Continue\r\n");
            assert_eq!(head.expects_continue, expects, "{version}");
        }
        assert!(!head("1.1", "expect: another\r\n").expects_continue);
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

    #[test]
    fn every_allowed_target_can_be_parsed() {
        for byte in (0..=255).filter(|byte| is_target(*byte)) {
            let target = [b'/', byte, b'?', byte];
            assert!(Uri::try_from(&target[..]).is_ok(), "{:?}", char::from(byte));
        }
    }
}
