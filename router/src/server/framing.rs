//! Watches the heads of requests on their way to hyper, for two things that it does not tell.
//!
//! A request that announces its length twice, as `Content-Length` and as `Transfer-Encoding`, is the
//! classic of request smuggling. RFC 9112 lets a server believe the encoding; hyper does, and drops
//! the length before anybody can see it. Here it is refused.
//!
//! A head that does not end is an attack, an idle connection is not. hyper has one time limit for
//! both; here the head has its own.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{HeaderMap, header};
use memchr::memchr;
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Sleep, sleep},
};

use crate::error::Error;

/// Longer than the names that matter.
const NAME_BYTES: usize = 20;

/// For a head to arrive, from its first byte.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// What the stream and the service of one connection share. They run in one task and never wait
/// for each other.
#[derive(Clone, Debug, Default)]
pub struct Framing(Arc<Mutex<Scan>>);

#[derive(Debug, Default)]
struct Scan {
    at: Place,
    /// Bytes read from the connection so far.
    read: u64,
    /// Where the last head ended, in the same count.
    head_end: u64,
    /// The beginning of the line that the last read broke off in.
    line: SmallVec<[u8; NAME_BYTES]>,
    has_request_line: bool,
    has_length: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// The next byte read belongs to a head.
    #[default]
    Head,
    /// A head has been read whole; its request is about to be answered.
    HeadRead,
    /// In a body, or in what a client has sent ahead: not known where the next head begins.
    Elsewhere,
}

impl Framing {
    /// Judges the request that hyper has just parsed.
    pub fn begin(&self, headers: &HeaderMap) -> Result<(), Error> {
        let mut scan = self.0.lock();
        let unambiguous = scan.at == Place::HeadRead && !scan.has_length;
        scan.at = Place::Elsewhere;
        // A head that was sent ahead of the last response has not been looked at. Nobody pipelines
        // uploads of unknown length.
        if headers.contains_key(header::TRANSFER_ENCODING) && !unambiguous {
            return Err(Error::AmbiguousLength);
        }
        Ok(())
    }

    /// The request's body has been read and had this many bytes, not counting any encoding.
    pub fn end(&self, body: usize) {
        let mut scan = self.0.lock();
        if scan.at == Place::Elsewhere && scan.read == scan.head_end + body as u64 {
            let read = scan.read;
            *scan = Scan { read, ..Scan::default() };
        }
    }
}

impl Scan {
    fn look(&mut self, mut bytes: &[u8]) {
        while self.at == Place::Head && !bytes.is_empty() {
            let end = memchr(b'\n', bytes);
            let (line, rest) = bytes.split_at(end.map_or(bytes.len(), |end| end + 1));
            let room = NAME_BYTES - self.line.len();
            self.line.extend_from_slice(&line[..line.len().min(room)]);
            self.read += line.len() as u64;
            bytes = rest;
            if end.is_some() {
                self.line_ended();
            }
        }
        self.read += bytes.len() as u64;
    }

    /// Within a head, neither before nor behind it.
    fn is_in_head(&self) -> bool {
        self.at == Place::Head && (self.has_request_line || !self.line.is_empty())
    }

    fn line_ended(&mut self) {
        let blank = matches!(&self.line[..], b"\n" | b"\r\n");
        if !blank {
            let name = self.line.split(|byte| *byte == b':').next().unwrap_or_default();
            self.has_length |= name.eq_ignore_ascii_case(b"content-length");
            self.has_request_line = true;
        } else if self.has_request_line {
            // Blank lines before a request are allowed; this one is the end of its head.
            self.at = Place::HeadRead;
            self.head_end = self.read;
        }
        self.line.clear();
    }
}

/// A client's connection that shows its heads to a [`Framing`].
pub struct Watched {
    stream: TcpStream,
    framing: Framing,
    /// Runs while a head has begun and not ended.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Watched {
    pub fn new(stream: TcpStream, framing: Framing) -> Self {
        Self { stream, framing, deadline: None }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf)?;
        let mut scan = this.framing.0.lock();
        scan.look(&buf.filled()[before..]);
        if !scan.is_in_head() {
            this.deadline = None;
        } else if polled.is_pending() {
            let deadline = this.deadline.get_or_insert_with(|| Box::pin(sleep(HEAD_TIMEOUT)));
            ready!(deadline.as_mut().poll(cx));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        polled.map(Ok)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &[u8] =
        b"\r\nPOST / HTTP/1.1\r\nHost: x\r\nCONTENT-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0";
    const ONE: &[u8] =
        b"POST / HTTP/1.1\r\nx: content-length:\r\ntransfer-encoding: chunked\r\n\r\n0";

    fn chunked() -> HeaderMap {
        [(header::TRANSFER_ENCODING, "chunked".parse().expect("a value"))].into_iter().collect()
    }

    /// However the bytes are cut into reads.
    fn judge(message: &[u8], cut: usize) -> Result<(), Error> {
        let framing = Framing::default();
        framing.0.lock().look(&message[..cut]);
        framing.0.lock().look(&message[cut..]);
        framing.begin(&chunked())
    }

    #[test]
    fn the_verdict_does_not_depend_on_the_reads() {
        for cut in 0..=BOTH.len() {
            assert_eq!(judge(BOTH, cut), Err(Error::AmbiguousLength), "cut at {cut}");
        }
        for cut in 0..=ONE.len() {
            assert_eq!(judge(ONE, cut), Ok(()), "cut at {cut}");
        }
    }

    #[test]
    fn the_next_head_is_found_behind_a_body_and_distrusted_when_sent_ahead() {
        let sized = b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}";
        let framing = Framing::default();
        framing.0.lock().look(sized);
        assert_eq!(framing.begin(&HeaderMap::new()), Ok(()));
        framing.end(2);
        framing.0.lock().look(ONE);
        assert_eq!(framing.begin(&chunked()), Ok(()), "a length of the request before");

        let framing = Framing::default();
        framing.0.lock().look(&[sized, &BOTH[..30]].concat());
        assert_eq!(framing.begin(&HeaderMap::new()), Ok(()));
        framing.end(2);
        framing.0.lock().look(&BOTH[30..]);
        assert_eq!(framing.begin(&chunked()), Err(Error::AmbiguousLength));
    }
}
