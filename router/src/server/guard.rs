//! The stream between a client and hyper. It passes one unambiguous message at a time to hyper.
//! - A head is buffered until it is complete and [`head::read`] has found it unambiguous.
//! - The next message is held back until the last response is sent, so that the start of a head is always known.
//! - A client has limited time for each part of a request: for its head, and for a pause in its body.
//! - A refused request is replaced by a stand-in request. The service answers it with the error, in the usual form,
//!   counted and logged.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::Instant,
};

use crate::{
    deadline_timer::DeadlineTimer,
    error::Error,
    server::{
        head::{self, BodyLength, Head},
        keep_alive::KeepAliveState,
    },
    wire::transport::Transport,
};

/// Time for the client to read the last response. A socket that is closed with unread bytes resets the connection,
/// and the client may lose the response.
const LINGER: Duration = Duration::from_secs(1);

/// The request that replaces a refused one.
const REPLACEMENT: &[u8] = b"GET / HTTP/1.1\r\nhost: refused\r\nconnection: close\r\n\r\n";

/// Time limits for the parts of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) head: Duration,
    pub(super) body_pause: Duration,
    /// Minimum mean rate of a body in bytes a second, beyond `body_pause`.
    pub(super) body_rate: u32,
}

pub(super) struct Guard {
    stream: Transport,
    keep_alive: KeepAliveState,
    limits: Limits,
    at: MessagePart,
    /// Bytes from the client that hyper has not read yet. Usually empty.
    held: Vec<u8>,
    /// Number of bytes of `held` that hyper may read now.
    released: usize,
    /// Start of the wait for a body, and the bytes that have come since.
    upload: Option<(Instant, u64)>,
    /// Whether the last write or flush was pending: bytes wait for the client.
    is_congested: bool,
    waiting: Option<(Wait, Instant)>,
    timer: Option<DeadlineTimer>,
}

/// The part of a message to which the next byte of the client belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessagePart {
    Head,
    Body {
        left: u64,
    },
    /// A chunked body. Only hyper knows its end, so no other message follows on this connection.
    Chunked,
    /// After a refusal. Further bytes are not read.
    Refused,
}

/// A wait for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Head,
    Body {
        /// Time from which on the body counts as too slow.
        slow_from: Instant,
    },
    Linger,
}

impl Guard {
    pub(super) fn new(stream: Transport, keep_alive: KeepAliveState, limits: Limits) -> Self {
        Self {
            stream,
            keep_alive,
            limits,
            at: MessagePart::Head,
            held: Vec::new(),
            released: 0,
            upload: None,
            is_congested: false,
            waiting: None,
            timer: None,
        }
    }

    pub(super) fn socket(&self) -> &TcpStream {
        self.stream.socket()
    }

    /// Records congestion after a write. A write that is ready does not prove the opposite: TLS keeps bytes until a
    /// flush.
    fn record_write<T>(&mut self, polled: &Poll<T>) {
        if polled.is_pending() {
            self.set_congestion(true);
        }
    }

    fn set_congestion(&mut self, congested: bool) {
        if self.is_congested != congested {
            self.is_congested = congested;
            self.keep_alive.set_congested(congested);
        }
    }

    /// Gives the released bytes to hyper.
    fn give(&mut self, buf: &mut ReadBuf<'_>) {
        let count = self.released.min(buf.remaining());
        buf.put_slice(&self.held[..count]);
        self.released -= count;
        self.held.drain(..count);
        if self.held.is_empty() {
            // Frees the buffer: idle connections are many.
            self.held = Vec::new();
        }
    }

    /// Starts a message with `available` bytes in the buffer. Returns how many of them belong to it.
    fn begin(&mut self, head: Head, available: usize) -> usize {
        self.keep_alive.begin(None);
        (self.waiting, self.upload) = (None, None);
        match head.body {
            BodyLength::Chunked => {
                self.at = MessagePart::Chunked;
                available
            }
            BodyLength::Exact(length) => {
                let here = length.min((available - head.end) as u64);
                self.advance(length, here);
                head.end + here as usize
            }
        }
    }

    fn advance(&mut self, left: u64, by: u64) {
        self.at =
            if left == by { MessagePart::Head } else { MessagePart::Body { left: left - by } };
        if left == by {
            self.keep_alive.uploaded();
        }
    }

    fn refuse(&mut self, error: Error) {
        self.keep_alive.begin(Some(error));
        self.at = MessagePart::Refused;
        self.held = REPLACEMENT.to_vec();
        self.released = REPLACEMENT.len();
    }

    fn slow_from(&mut self) -> Instant {
        let (since, bytes) = *self.upload.get_or_insert_with(|| (Instant::now(), 0));
        let earned = Duration::from_secs(bytes) / self.limits.body_rate;
        since + self.limits.body_pause + earned
    }

    /// Ready when the time for `wait` is over. It starts with the first call for this wait.
    fn poll_wait(&mut self, wait: Wait, cx: &mut Context<'_>) -> Poll<()> {
        let limit = match wait {
            Wait::Head => self.limits.head,
            Wait::Body { slow_from } => {
                self.limits.body_pause.min(slow_from.saturating_duration_since(Instant::now()))
            }
            Wait::Linger => LINGER,
        };
        let until = match self.waiting {
            Some((same, until)) if same == wait => until,
            _ => Instant::now() + limit,
        };
        self.waiting = Some((wait, until));
        self.timer.get_or_insert_with(|| DeadlineTimer::new(until)).poll(until, cx)
    }

    /// Reads a head.
    fn poll_head(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        loop {
            if !self.held.is_empty() {
                match head::read(&self.held) {
                    Ok(Some(head)) => self.released = self.begin(head, self.held.len()),
                    Ok(None) => {}
                    Err(error) => self.refuse(error),
                }
                if self.released > 0 {
                    return Poll::Ready(Ok(()));
                }
            }
            if Pin::new(&mut self.stream).poll_read(cx, buf)?.is_pending() {
                if self.held.is_empty() {
                    return Poll::Pending;
                }
                self.keep_alive.record_bytes();
                ready!(self.poll_wait(Wait::Head, cx));
                self.refuse(Error::HeadTimeout { after: self.limits.head });
                return Poll::Ready(Ok(()));
            }
            let read = &buf.filled()[before..];
            if read.is_empty() {
                return Poll::Ready(Ok(()));
            }
            // Most heads come in one piece and are not copied.
            if self.held.is_empty()
                && let Ok(Some(head)) = head::read(read)
            {
                let own = self.begin(head, read.len());
                self.hold_back(buf, before + own);
                return Poll::Ready(Ok(()));
            }
            self.hold_back(buf, before);
        }
    }

    /// Detects a disconnect during a response. Bytes of the next request are held back.
    fn poll_end(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.held.is_empty() {
            let before = buf.filled().len();
            ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
            if buf.filled().len() == before {
                return Poll::Ready(Ok(()));
            }
            self.hold_back(buf, before);
        }
        self.keep_alive.wake_at_end(cx.waker());
        Poll::Pending
    }

    /// Holds back the bytes of `buf` from `from` on.
    fn hold_back(&mut self, buf: &mut ReadBuf<'_>, from: usize) {
        self.held.extend_from_slice(&buf.filled()[from..]);
        buf.set_filled(from);
    }

    /// Reads a part of a body.
    fn poll_body(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        match Pin::new(&mut self.stream).poll_read(cx, buf)? {
            Poll::Ready(()) => {
                self.waiting = None;
                if let Some((_, bytes)) = &mut self.upload {
                    *bytes += (buf.filled().len() - before) as u64;
                }
            }
            Poll::Pending if self.keep_alive.is_uploaded() => return Poll::Pending,
            Poll::Pending if self.keep_alive.is_draining() => {
                return Poll::Ready(Err(io::Error::other(Error::Draining)));
            }
            Poll::Pending => {
                let slow_from = self.slow_from();
                ready!(self.poll_wait(Wait::Body { slow_from }, cx));
                let Limits { body_pause: after, body_rate: rate, .. } = self.limits;
                let is_slow = Instant::now() >= slow_from;
                let error = if is_slow {
                    Error::BodyTooSlow { rate }
                } else {
                    Error::BodyTimeout { after }
                };
                return Poll::Ready(Err(io::Error::other(error)));
            }
        }
        if let MessagePart::Body { left } = self.at {
            let own = left.min((buf.filled().len() - before) as u64);
            self.hold_back(buf, before + own as usize);
            self.advance(left, own);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Guard {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.released == 0 {
            ready!(match this.at {
                MessagePart::Head if this.keep_alive.is_answering() => this.poll_end(cx, buf),
                MessagePart::Head => this.poll_head(cx, buf),
                MessagePart::Body { .. } | MessagePart::Chunked => this.poll_body(cx, buf),
                MessagePart::Refused => Poll::Pending,
            })?;
        }
        if this.released > 0 {
            this.give(buf);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Guard {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.record_write(&polled);
        polled
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.record_write(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_flush(cx);
        this.set_congestion(polled.is_pending());
        polled
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
        if this.at == MessagePart::Head {
            return Poll::Ready(Ok(()));
        }
        let mut sink = [MaybeUninit::uninit(); 4096];
        loop {
            let mut sink = ReadBuf::uninit(&mut sink);
            let polled = Pin::new(&mut this.stream).poll_read(cx, &mut sink);
            // Also for a client that does not stop sending.
            let is_over = this.poll_wait(Wait::Linger, cx).is_ready();
            match polled {
                Poll::Ready(Ok(())) if !sink.filled().is_empty() && !is_over => {}
                Poll::Pending if !is_over => return Poll::Pending,
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}
