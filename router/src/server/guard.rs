//! The stream between a client and hyper, which shows hyper one honest message at a time.
//!
//! - A head is held back until it is whole and [`head::read`] has found one reading of it.
//! - The next message is held back until the last response is out, so that it is always known where
//!   a head begins.
//! - A client has limited time for each part: its head, a pause in its body.
//! - What is refused is replaced by a stand-in request, which the service answers with the refusal
//!   like any other: in its shape, with its id, counted and logged.

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
    alarm::Alarm,
    error::Error,
    server::{
        head::{self, BodyLength, Head},
        turn::Turn,
    },
    wire::transport::Transport,
};

/// After a last response, for the client to read it: a socket that is closed with bytes unread tells
/// the peer to forget what it has not read yet.
const LINGER: Duration = Duration::from_secs(1);

const STAND_IN: &[u8] = b"GET / HTTP/1.1\r\nhost: refused\r\nconnection: close\r\n\r\n";

/// How long the parts of a request may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) head: Duration,
    pub(super) body_pause: Duration,
    /// Bytes a second, on the whole; each body has `body_pause` on top.
    pub(super) body_rate: u32,
}

pub(super) struct Guard {
    stream: Transport,
    turn: Turn,
    limits: Limits,
    at: Place,
    /// Read from the client and not yet shown to hyper. Empty most of the time.
    held: Vec<u8>,
    /// As much of `held` as hyper may read now.
    released: usize,
    /// Of a body that is waited for: since when, and how many bytes have come since.
    upload: Option<(Instant, u64)>,
    /// Bytes wait for the client to take them, by the last write or flush.
    is_congested: bool,
    waiting: Option<(Wait, Instant)>,
    alarm: Option<Alarm>,
}

/// What the next byte of the client belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Head,
    Body {
        left: u64,
    },
    /// A body whose end only hyper knows. No other message follows on this connection.
    Chunked,
    /// Nothing that is read any more.
    Refused,
}

/// What a client is given time for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Head,
    Body {
        /// From then on what has come so far is too little.
        slow_from: Instant,
    },
    Linger,
}

impl Guard {
    pub(super) fn new(stream: Transport, turn: Turn, limits: Limits) -> Self {
        Self {
            stream,
            turn,
            limits,
            at: Place::Head,
            held: Vec::new(),
            released: 0,
            upload: None,
            is_congested: false,
            waiting: None,
            alarm: None,
        }
    }

    pub(super) fn socket(&self) -> &TcpStream {
        self.stream.socket()
    }

    /// A write that need not wait does not mean that its bytes are out: TLS keeps some until a flush.
    fn note_write<T>(&mut self, polled: &Poll<T>) {
        if polled.is_pending() {
            self.note_congestion(true);
        }
    }

    fn note_congestion(&mut self, congested: bool) {
        if self.is_congested != congested {
            self.is_congested = congested;
            self.turn.congest(congested);
        }
    }

    /// Hands over what has been released of `held`.
    fn give(&mut self, buf: &mut ReadBuf<'_>) {
        let count = self.released.min(buf.remaining());
        buf.put_slice(&self.held[..count]);
        self.released -= count;
        self.held.drain(..count);
        if self.held.is_empty() {
            // It was large once, and idle connections are many.
            self.held = Vec::new();
        }
    }

    /// A message of which `available` bytes are here has begun; how many of them are its own.
    fn begin(&mut self, head: Head, available: usize) -> usize {
        self.turn.begin(None);
        (self.waiting, self.upload) = (None, None);
        match head.body {
            BodyLength::Chunked => {
                self.at = Place::Chunked;
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
        self.at = if left == by { Place::Head } else { Place::Body { left: left - by } };
        if left == by {
            self.turn.uploaded();
        }
    }

    fn refuse(&mut self, error: Error) {
        self.turn.begin(Some(error));
        self.at = Place::Refused;
        self.held = STAND_IN.to_vec();
        self.released = STAND_IN.len();
    }

    fn slow_from(&mut self) -> Instant {
        let (since, bytes) = *self.upload.get_or_insert_with(|| (Instant::now(), 0));
        let earned = Duration::from_secs(bytes) / self.limits.body_rate;
        since + self.limits.body_pause + earned
    }

    /// Ready when the client has had its time for `wait`, which begins with the first call for it.
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
        self.alarm.get_or_insert_with(|| Alarm::new(until)).poll(until, cx)
    }

    /// Reads a head, or waits for one.
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
                self.turn.disturb();
                ready!(self.poll_wait(Wait::Head, cx));
                self.refuse(Error::HeadTimeout { after: self.limits.head });
                return Poll::Ready(Ok(()));
            }
            let read = &buf.filled()[before..];
            if read.is_empty() {
                return Poll::Ready(Ok(()));
            }
            // Most heads come in one piece and go on without being copied.
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

    /// During a response: sees whether the client leaves. What it sends ahead has to wait.
    fn poll_end(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.held.is_empty() {
            let before = buf.filled().len();
            ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
            if buf.filled().len() == before {
                return Poll::Ready(Ok(()));
            }
            self.hold_back(buf, before);
        }
        self.turn.wake_at_end(cx.waker());
        Poll::Pending
    }

    /// What has been read beyond `from` is not for hyper yet.
    fn hold_back(&mut self, buf: &mut ReadBuf<'_>, from: usize) {
        self.held.extend_from_slice(&buf.filled()[from..]);
        buf.set_filled(from);
    }

    /// Reads within a body.
    fn poll_body(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        match Pin::new(&mut self.stream).poll_read(cx, buf)? {
            Poll::Ready(()) => {
                self.waiting = None;
                if let Some((_, bytes)) = &mut self.upload {
                    *bytes += (buf.filled().len() - before) as u64;
                }
            }
            Poll::Pending if self.turn.is_uploaded() => return Poll::Pending,
            Poll::Pending if self.turn.is_draining() => {
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
        if let Place::Body { left } = self.at {
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
                Place::Head if this.turn.is_answering() => this.poll_end(cx, buf),
                Place::Head => this.poll_head(cx, buf),
                Place::Body { .. } | Place::Chunked => this.poll_body(cx, buf),
                Place::Refused => Poll::Pending,
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
        this.note_write(&polled);
        polled
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.note_write(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_flush(cx);
        this.note_congestion(polled.is_pending());
        polled
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
        if this.at == Place::Head {
            return Poll::Ready(Ok(()));
        }
        let mut sink = [MaybeUninit::uninit(); 4096];
        loop {
            let mut sink = ReadBuf::uninit(&mut sink);
            let polled = Pin::new(&mut this.stream).poll_read(cx, &mut sink);
            // Also when more comes and comes: a sender that does not stop gets no longer than that.
            let is_over = this.poll_wait(Wait::Linger, cx).is_ready();
            match polled {
                Poll::Ready(Ok(())) if !sink.filled().is_empty() && !is_over => {}
                Poll::Pending if !is_over => return Poll::Pending,
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}
