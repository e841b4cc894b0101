//! The head of a worker's response, and the framing of its body (RFC 9112 section 6.3).

use std::mem::MaybeUninit;

use bytes::Bytes;
use http::{Response, StatusCode, Version, response::Parts};
use httparse::{Header, ParserConfig, Status};
use hyper::ext::ReasonPhrase;

use crate::{
    heap::boxed,
    wire::{
        chunked::Chunked,
        http1::{ConnectionOptions, list, number, to_map},
    },
};

/// Maximum number of header fields.
const MAX_FIELDS: usize = 100;

/// Room for the fields that the router adds.
const ROOM: usize = 2;

const LENGTH: &str = "a malformed Content-Length";

/// The rest of a response body.
#[derive(Debug)]
pub(super) enum Framing {
    /// This number of bytes.
    Length(u64),
    Chunked(Chunked),
    /// All bytes until the worker closes the connection.
    UntilClose,
}

/// A complete head.
pub(super) struct Head {
    /// Boxed, because they are large and passed on.
    pub(super) parts: Box<Parts>,
    pub(super) framing: Framing,
    /// Whether the connection may be used again after the body.
    pub(super) keeps_alive: bool,
}

/// Reads the head at the start of `unread`, and leaves the bytes after it there. `None` if it is incomplete. Skips
/// interim responses (1xx). `to_head` tells whether the request was a HEAD: its response has no body. Fails with the
/// defect of a malformed head.
pub(super) fn read(unread: &mut Bytes, to_head: bool) -> Result<Option<Head>, &'static str> {
    loop {
        let mut fields = [const { MaybeUninit::uninit() }; MAX_FIELDS];
        let mut response = httparse::Response::new(&mut []);
        let parsed = ParserConfig::default()
            .parse_response_with_uninit_headers(&mut response, unread, &mut fields)
            .map_err(|_| "a malformed head")?;
        let Status::Complete(length) = parsed else {
            return Ok(None);
        };
        // RFC 9110 15: a status from 600 on is invalid.
        let code = response.code.filter(|code| *code < 600);
        let status = code.and_then(|code| StatusCode::from_u16(code).ok());
        let status = status.ok_or("a malformed status")?;
        let version = response.version.unwrap_or_default();
        if status == StatusCode::SWITCHING_PROTOCOLS {
            return Err("a switch of protocols that no request asks for");
        }
        if status.is_informational() {
            drop(unread.split_to(length));
            continue;
        }
        let fields = Fields::read(response.headers);
        let headers = to_map(response.headers.iter(), unread, response.headers.len() + ROOM)?;
        let reason = response.reason.filter(|reason| Some(*reason) != status.canonical_reason());
        let reason = reason.and_then(|reason| ReasonPhrase::try_from(reason.as_bytes()).ok());
        let has_no_body =
            to_head || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        let framing = if has_no_body { Framing::Length(0) } else { fields.framing(version)? };
        let keeps_alive = !matches!(framing, Framing::UntilClose) && fields.keeps_alive(version);
        drop(unread.split_to(length));
        let mut parts = boxed(|| Response::new(()).into_parts().0);
        parts.status = status;
        parts.version = if version == 0 { Version::HTTP_10 } else { Version::HTTP_11 };
        parts.headers = headers;
        if let Some(reason) = reason {
            parts.extensions.insert(reason);
        }
        return Ok(Some(Head { parts, framing, keeps_alive }));
    }
}

/// The fields that determine the end of the message, and whether another one may follow.
#[derive(Default)]
struct Fields<'a> {
    /// The last transfer coding.
    coding: Option<&'a [u8]>,
    /// The length of the content. An error if it is malformed, or one length differs from another.
    length: Option<Result<u64, &'static str>>,
    options: ConnectionOptions,
}

impl<'a> Fields<'a> {
    fn read(fields: &[Header<'a>]) -> Self {
        let mut read = Self::default();
        for Header { name, value } in fields {
            match name.len() {
                10 if name.eq_ignore_ascii_case("connection") => read.options.read(value),
                14 if name.eq_ignore_ascii_case("content-length") => {
                    for length in list(value).map(|text| number(text).ok_or(LENGTH)) {
                        let is_same = read.length.is_none_or(|before| before == length);
                        read.length = Some(if is_same { length } else { Err(LENGTH) });
                    }
                }
                17 if name.eq_ignore_ascii_case("transfer-encoding") => {
                    read.coding = list(value).last();
                }
                _ => {}
            }
        }
        read
    }

    fn framing(&self, version: u8) -> Result<Framing, &'static str> {
        match (self.coding, self.length) {
            (Some(_), _) if version == 0 => Err("a transfer coding in HTTP/1.0"),
            (Some(coding), _) if coding.eq_ignore_ascii_case(b"chunked") => {
                Ok(Framing::Chunked(Chunked::new()))
            }
            (Some(_), _) | (None, None) => Ok(Framing::UntilClose),
            (None, Some(length)) => length.map(Framing::Length),
        }
    }

    /// A message with both kinds of framing may have come from two senders that read it differently.
    fn keeps_alive(&self, version: u8) -> bool {
        let is_ambiguous = self.coding.is_some() && self.length.is_some();
        !is_ambiguous && self.options.keeps_alive(version)
    }
}

impl Framing {
    pub(super) fn is_complete(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(chunked) => chunked.is_complete(),
            Self::UntilClose => false,
        }
    }

    /// Takes the next data out of `unread`. `None` if more bytes are needed, or the body is complete. Fails with the
    /// defect of a malformed body.
    pub(super) fn next(&mut self, unread: &mut Bytes) -> Result<Option<Bytes>, &'static str> {
        match self {
            Self::Chunked(chunked) => chunked.next(unread),
            _ if unread.is_empty() => Ok(None),
            Self::UntilClose => Ok(Some(unread.split_to(unread.len()))),
            Self::Length(0) => Ok(None),
            Self::Length(left) => {
                let length = usize::try_from(*left).unwrap_or(usize::MAX).min(unread.len());
                *left -= length as u64;
                Ok(Some(unread.split_to(length)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_whole(head: &str) -> Result<Head, &'static str> {
        let mut unread = Bytes::copy_from_slice(head.as_bytes());
        let head = read(&mut unread, false)?.ok_or("an incomplete head")?;
        assert_eq!(unread, "rest");
        Ok(head)
    }

    /// Framing and keep-alive of a response with these fields.
    fn framing(fields: &str) -> Result<(String, bool), &'static str> {
        let head = read_whole(&format!("HTTP/1.1 200 OK\r\n{fields}\r\nrest"))?;
        let framing = match head.framing {
            Framing::Length(length) => length.to_string(),
            Framing::Chunked(_) => "chunked".to_owned(),
            Framing::UntilClose => "until close".to_owned(),
        };
        Ok((framing, head.keeps_alive))
    }

    #[test]
    fn a_head_is_read_once_it_is_complete() {
        let text = "HTTP/1.1 201 Very Good\r\ncontent-length: 4\r\nX-A: 1\r\nx-a:  2 \r\n\r\n";
        for end in 0..text.len() {
            let mut unread = Bytes::copy_from_slice(&text.as_bytes()[..end]);
            assert!(read(&mut unread, false).expect("well-formed").is_none(), "{end}");
            assert_eq!(unread.len(), end);
        }
        let Head { parts, .. } = read_whole(&format!("{text}rest")).expect("well-formed");
        assert_eq!((parts.status, parts.version), (StatusCode::CREATED, Version::HTTP_11));
        let values: Vec<_> = parts.headers.get_all("x-a").iter().collect();
        assert_eq!(values, ["1", "2"]);
    }

    #[test]
    fn interim_responses_are_skipped() {
        let interim = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n";
        let mut unread = Bytes::copy_from_slice(interim.as_bytes());
        assert!(read(&mut unread, false).expect("well-formed").is_none());
        let head = read_whole(&format!("{interim}HTTP/1.1 204 \r\n\r\nrest")).expect("a head");
        assert_eq!(head.parts.status, StatusCode::NO_CONTENT);
        assert!(head.parts.headers.is_empty() && head.framing.is_complete() && head.keeps_alive);
    }

    #[test]
    fn a_response_to_head_has_no_body() {
        let mut unread = Bytes::from_static(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n");
        let head = read(&mut unread, true).expect("well-formed").expect("complete");
        assert!(head.framing.is_complete() && head.keeps_alive);
    }

    #[test]
    fn the_fields_determine_the_end_of_the_body() {
        for (fields, expected, keeps) in [
            ("content-length: 0\r\n", "0", true),
            ("content-length: 12, 12\r\ncontent-length: 12\r\n", "12", true),
            ("transfer-encoding: chunked\r\n", "chunked", true),
            ("transfer-encoding: gzip\r\ntransfer-encoding: x, Chunked\r\n", "chunked", true),
            ("transfer-encoding: chunked\r\ncontent-length: 5\r\n", "chunked", false),
            ("transfer-encoding: chunked, gzip\r\n", "until close", false),
            ("", "until close", false),
            ("content-length: 3\r\nconnection: x, Close\r\n", "3", false),
            ("content-length: 3\r\nconnection: keep-alive\r\n", "3", true),
        ] {
            assert_eq!(framing(fields), Ok((expected.to_owned(), keeps)), "{fields:?}");
        }
    }

    #[test]
    fn http_10_keeps_the_connection_only_if_it_says_so() {
        for (connection, keeps) in [("", false), ("connection: Keep-Alive\r\n", true)] {
            let text = format!("HTTP/1.0 200 OK\r\ncontent-length: 1\r\n{connection}\r\nrest");
            assert_eq!(read_whole(&text).expect("well-formed").keeps_alive, keeps);
        }
    }

    #[test]
    fn malformed_heads_are_refused() {
        for fields in [
            "content-length: 1\r\ncontent-length: 2\r\n",
            "content-length: +1\r\n",
            "content-length:\r\n",
            "content-length: 1 2\r\n",
            "content-length: 9999999999999999999\r\n",
            "a b: c\r\n",
            "a: \0\r\n",
        ] {
            assert!(framing(fields).is_err(), "{fields:?}");
        }
        let many = format!("HTTP/1.1 200 OK\r\n{}", "a: b\r\n".repeat(MAX_FIELDS + 1));
        let switch =
            "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n";
        let [low, high] = ["HTTP/1.1 99 x\r\n\r\n", "HTTP/1.1 600 x\r\n\r\n"];
        for head in ["garbage\r\n\r\n", "HTTP/2 200\r\n\r\n", low, high, switch, &many] {
            assert!(read(&mut Bytes::copy_from_slice(head.as_bytes()), false).is_err(), "{head:?}");
        }
        let coded = "HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\nrest";
        assert!(read_whole(coded).is_err());
    }
}
