//! The head of a worker's response, and the framing of its body (RFC 9112 section 6.3).

use std::mem::MaybeUninit;

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode, Version, header, response::Parts};
use httparse::{ParserConfig, Status};
use hyper::ext::ReasonPhrase;

use crate::wire::{
    chunked::Chunked,
    http1::{keeps_alive, list, to_map},
};

/// Maximum number of header fields.
const MAX_FIELDS: usize = 100;

/// Room for the fields that the router adds.
const ROOM: usize = 2;

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
    pub(super) parts: Parts,
    pub(super) framing: Framing,
    /// Whether the connection may be used again after the body.
    pub(super) keeps_alive: bool,
}

/// Reads the head at the start of `unread`, and leaves the bytes behind it there. `None` if it is incomplete. Skips
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
        let status = response.code.and_then(|code| StatusCode::from_u16(code).ok());
        let status = status.ok_or("a malformed status")?;
        let version = response.version.unwrap_or_default();
        if status.is_informational() && status != StatusCode::SWITCHING_PROTOCOLS {
            drop(unread.split_to(length));
            continue;
        }
        let headers = to_map(response.headers, unread, ROOM)?;
        let reason = response.reason.filter(|reason| Some(*reason) != status.canonical_reason());
        let reason = reason.and_then(|reason| ReasonPhrase::try_from(reason.as_bytes()).ok());
        drop(unread.split_to(length));
        let has_no_body = to_head
            || matches!(
                status,
                StatusCode::SWITCHING_PROTOCOLS | StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED
            );
        let framing =
            if has_no_body { Framing::Length(0) } else { Framing::of(&headers, version)? };
        let keeps_alive = status != StatusCode::SWITCHING_PROTOCOLS
            && !matches!(framing, Framing::UntilClose)
            && keeps_alive(&headers, version);
        let mut parts = Response::new(()).into_parts().0;
        parts.status = status;
        parts.version = if version == 0 { Version::HTTP_10 } else { Version::HTTP_11 };
        parts.headers = headers;
        if let Some(reason) = reason {
            parts.extensions.insert(reason);
        }
        return Ok(Some(Head { parts, framing, keeps_alive }));
    }
}

impl Framing {
    fn of(headers: &HeaderMap, version: u8) -> Result<Self, &'static str> {
        if let Some(coding) = headers.get_all(header::TRANSFER_ENCODING).iter().next_back() {
            if version == 0 {
                return Err("a transfer coding in HTTP/1.0");
            }
            let last = coding.as_bytes().rsplit(|byte| *byte == b',').next().unwrap_or_default();
            let is_chunked = last.trim_ascii().eq_ignore_ascii_case(b"chunked");
            return Ok(if is_chunked { Self::Chunked(Chunked::new()) } else { Self::UntilClose });
        }
        let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter().flat_map(list).map(number);
        let Some(first) = lengths.next() else {
            return Ok(Self::UntilClose);
        };
        match first {
            Some(length) if lengths.all(|other| other == first) => Ok(Self::Length(length)),
            _ => Err("a malformed Content-Length"),
        }
    }

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

/// A number of up to 18 digits, which fits into u64.
fn number(text: &[u8]) -> Option<u64> {
    let is_number = (1..=18).contains(&text.len()) && text.iter().all(u8::is_ascii_digit);
    is_number.then(|| text.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0')))
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
        for head in ["garbage\r\n\r\n", "HTTP/2 200\r\n\r\n", "HTTP/1.1 99 x\r\n\r\n", &many] {
            assert!(read(&mut Bytes::copy_from_slice(head.as_bytes()), false).is_err(), "{head:?}");
        }
        let coded = "HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\nrest";
        assert!(read_whole(coded).is_err());
    }
}
