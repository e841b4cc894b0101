//! The stream of a client: one request after the other is read from it, each part of a request in limited time.

use std::{
    io,
    mem::MaybeUninit,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{BufMut, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::Instant,
};

use crate::{
    deadline_timer::SharedTimer,
    error::Error,
    server::head::{self, BodyLength, Head},
    wire::{chunked::Chunked, http1::poll_fill, transport::Transport},
};

/// Wait for the next request after which the buffers of a connection are freed.
const RELEASE_AFTER: Duration = Duration::from_secs(1);

/// Time for the client to read the last response. A socket that is closed with unread bytes resets the connection,
/// and the client may lose the response.
const LINGER: Duration = Duration::from_secs(1);

/// Bytes by which the buffer of a body grows at least.
const BODY_STEP: usize = 16 << 10;

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Time limits for the parts of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) head: Duration,
    pub(super) body_pause: Duration,
    /// Minimum mean rate of a body in bytes a second, beyond `body_pause`.
    pub(super) body_rate: u32,
}

/// What a client does next.
pub(super) enum Next {
    Request(Head),
    /// A request that cannot be read. It is answered with the error, and nothing after it is read.
    Refused(Error),
    /// It has sent nothing for [`RELEASE_AFTER`].
    Idle,
    /// It has closed the connection, or the connection is to be closed.
    Closed,
}

/// What the lifecycle of the router asks of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Orders {
    /// Responses close the connection.
    pub(super) closes: bool,
    /// The connection is closed instead of waiting for another request.
    pub(super) leaves: bool,
}

pub(super) struct ClientStream {
    pub(super) transport: Transport,
    limits: Limits,
    pub(super) orders: Orders,
    /// Bytes from the client that have not been parsed. Usually empty.
    unread: Bytes,
    at: MessagePart,
    /// Bytes of a 100 (Continue) that are to be sent before the body is read.
    invitation: &'static [u8],
    /// Start of the wait for a body, and the bytes that have come since.
    upload: Option<(Instant, u64)>,
    waiting: Option<(Wait, Instant)>,
    /// No request has it while the stream waits.
    timer: SharedTimer,
}

/// The part of a message to which the next byte of the client belongs.
#[derive(Debug)]
enum MessagePart {
    Head,
    Body {
        left: u64,
    },
    Chunked(Chunked),
    /// After a refusal. Further bytes are not parsed.
    Refused,
}

/// A wait for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Request,
    Head,
    Body {
        /// Time from which on the body counts as too slow.
        slow_from: Instant,
    },
    Linger,
}

impl ClientStream {
    pub(super) fn new(transport: Transport, limits: Limits, timer: SharedTimer) -> Self {
        Self {
            transport,
            limits,
            orders: Orders::default(),
            unread: Bytes::new(),
            at: MessagePart::Head,
            invitation: &[],
            upload: None,
            waiting: None,
            timer,
        }
    }

    pub(super) fn socket(&self) -> &TcpStream {
        self.transport.socket()
    }

    /// Ready when the time for `wait` is over. It starts with the first call for this wait.
    fn poll_wait(&mut self, wait: Wait, cx: &mut Context<'_>) -> Poll<()> {
        let until = match self.waiting {
            Some((same, until)) if same == wait => until,
            _ => {
                let now = Instant::now();
                now + match wait {
                    Wait::Request => RELEASE_AFTER,
                    Wait::Head => self.limits.head,
                    Wait::Body { slow_from } => {
                        self.limits.body_pause.min(slow_from.saturating_duration_since(now))
                    }
                    Wait::Linger => LINGER,
                }
            }
        };
        self.waiting = Some((wait, until));
        self.timer.poll(until, cx)
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        poll_fill(&mut self.transport, &mut self.unread, cx)
    }

    /// Waits for the next request and reads its head.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Next>> {
        loop {
            if !self.unread.is_empty() {
                match head::read(&mut self.unread) {
                    Ok(Some(head)) => {
                        self.begin(&head);
                        return Poll::Ready(Ok(Next::Request(head)));
                    }
                    Ok(None) => {}
                    Err(error) => return Poll::Ready(Ok(self.refuse(error))),
                }
            }
            match self.poll_fill(cx)? {
                Poll::Ready(true) => {}
                Poll::Ready(false) => return Poll::Ready(Ok(Next::Closed)),
                Poll::Pending if self.orders.leaves => return Poll::Ready(Ok(Next::Closed)),
                Poll::Pending if self.unread.is_empty() => {
                    ready!(self.poll_wait(Wait::Request, cx));
                    return Poll::Ready(Ok(Next::Idle));
                }
                Poll::Pending => {
                    ready!(self.poll_wait(Wait::Head, cx));
                    let after = self.limits.head;
                    return Poll::Ready(Ok(self.refuse(Error::HeadTimeout { after })));
                }
            }
        }
    }

    fn begin(&mut self, head: &Head) {
        (self.waiting, self.upload) = (None, None);
        self.invitation = if head.expects_continue { CONTINUE } else { &[] };
        self.at = match head.body {
            BodyLength::Exact(0) => MessagePart::Head,
            BodyLength::Exact(left) => MessagePart::Body { left },
            BodyLength::Chunked => MessagePart::Chunked(Chunked::new()),
        };
    }

    fn refuse(&mut self, error: Error) -> Next {
        self.at = MessagePart::Refused;
        Next::Refused(error)
    }

    /// The announced length of the rest of the body; 0 for a chunked body.
    pub(super) fn announced(&self) -> u64 {
        if let MessagePart::Body { left } = self.at { left } else { 0 }
    }

    /// Takes the rest of the body without a copy, if all of it has arrived.
    pub(super) fn take_body(&mut self) -> Option<Bytes> {
        match self.at {
            MessagePart::Head => Some(Bytes::new()),
            MessagePart::Body { left } if left <= self.unread.len() as u64 => {
                self.at = MessagePart::Head;
                Some(self.unread.split_to(left as usize))
            }
            _ => None,
        }
    }

    /// Appends the next part of the body to `body`. Ready with false at its end.
    pub(super) fn poll_body(
        &mut self,
        body: &mut BytesMut,
        cx: &mut Context<'_>,
    ) -> Poll<Result<bool, Error>> {
        if !self.unread.is_empty() {
            // The client has not waited.
            self.invitation = &[];
        }
        loop {
            match &mut self.at {
                MessagePart::Head | MessagePart::Refused => return Poll::Ready(Ok(false)),
                MessagePart::Body { left } if !self.unread.is_empty() => {
                    let length = (*left).min(self.unread.len() as u64);
                    body.extend_from_slice(&self.unread.split_to(length as usize));
                    self.advance(length);
                    return Poll::Ready(Ok(true));
                }
                MessagePart::Body { left } => {
                    let left = *left;
                    let length = ready!(self.poll_arrival(cx, |this, cx| {
                        poll_read(&mut this.transport, body, left, cx)
                    }))?;
                    self.advance(length);
                    return Poll::Ready(Ok(true));
                }
                MessagePart::Chunked(chunked) => {
                    let malformed = |defect: &str| Error::BadBody(defect.to_owned());
                    if let Some(data) = chunked.next(&mut self.unread).map_err(malformed)? {
                        body.extend_from_slice(&data);
                        return Poll::Ready(Ok(true));
                    }
                    if chunked.is_complete() {
                        self.at = MessagePart::Head;
                        return Poll::Ready(Ok(false));
                    }
                    ready!(self.poll_arrival(cx, |this, cx| {
                        let before = this.unread.len();
                        ready!(this.poll_fill(cx))?;
                        Poll::Ready(Ok((this.unread.len() - before) as u64))
                    }))?;
                }
            }
        }
    }

    /// Waits for bytes of a body, which `read` reads, within their time limits. Returns their number.
    fn poll_arrival(
        &mut self,
        cx: &mut Context<'_>,
        read: impl FnOnce(&mut Self, &mut Context<'_>) -> Poll<io::Result<u64>>,
    ) -> Poll<Result<u64, Error>> {
        let failed = |error: io::Error| Error::BadBody(error.to_string());
        while !self.invitation.is_empty() {
            let invited = Pin::new(&mut self.transport).poll_write(cx, self.invitation);
            match ready!(invited).map_err(failed)? {
                0 => return Poll::Ready(Err(failed(io::ErrorKind::WriteZero.into()))),
                written => self.invitation = &self.invitation[written..],
            }
        }
        match read(self, cx) {
            Poll::Ready(Ok(0)) => Poll::Ready(Err(Error::BadBody("it is incomplete".to_owned()))),
            Poll::Ready(Ok(count)) => {
                self.waiting = None;
                if let Some((_, bytes)) = &mut self.upload {
                    *bytes += count;
                }
                Poll::Ready(Ok(count))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(failed(error))),
            Poll::Pending => {
                ready!(Pin::new(&mut self.transport).poll_flush(cx)).map_err(failed)?;
                let slow_from = self.slow_from();
                ready!(self.poll_wait(Wait::Body { slow_from }, cx));
                let Limits { body_pause: after, body_rate: rate, .. } = self.limits;
                let is_slow = Instant::now() >= slow_from;
                Poll::Ready(Err(if is_slow {
                    Error::BodyTooSlow { rate }
                } else {
                    Error::BodyTimeout { after }
                }))
            }
        }
    }

    fn slow_from(&mut self) -> Instant {
        let (since, bytes) = *self.upload.get_or_insert_with(|| (Instant::now(), 0));
        let earned = Duration::from_secs(bytes) / self.limits.body_rate;
        since + self.limits.body_pause + earned
    }

    fn advance(&mut self, by: u64) {
        if let MessagePart::Body { left } = &mut self.at {
            *left -= by;
            if *left == 0 {
                self.at = MessagePart::Head;
            }
        }
    }

    /// Whether the whole request has arrived. A body that nobody has read is dropped.
    pub(super) fn end_request(&mut self) -> bool {
        let is_complete = self.take_body().is_some();
        if is_complete {
            self.at = MessagePart::Head;
        }
        is_complete
    }

    /// Ready if the client disconnects after its request. The bytes of a next request are kept.
    pub(super) fn poll_disconnect(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // During an upload its reader gets the error.
        if !matches!(self.at, MessagePart::Head) || !self.unread.is_empty() {
            return Poll::Pending;
        }
        match self.poll_fill(cx) {
            Poll::Ready(Ok(true)) | Poll::Pending => Poll::Pending,
            Poll::Ready(_) => Poll::Ready(()),
        }
    }

    /// Closes the connection. A client that is still sending gets time to read the response.
    pub(super) fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.transport).poll_shutdown(cx))?;
        if matches!(self.at, MessagePart::Head) && self.unread.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let mut sink = [MaybeUninit::uninit(); 4096];
        loop {
            let mut sink = ReadBuf::uninit(&mut sink);
            let polled = Pin::new(&mut self.transport).poll_read(cx, &mut sink);
            // Also for a client that does not stop sending.
            let is_over = self.poll_wait(Wait::Linger, cx).is_ready();
            match polled {
                Poll::Ready(Ok(())) if !sink.filled().is_empty() && !is_over => {}
                Poll::Pending if !is_over => return Poll::Pending,
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}

/// Reads at most `limit` bytes and appends them to `body`. Returns their number.
fn poll_read(
    transport: &mut Transport,
    body: &mut BytesMut,
    limit: u64,
    cx: &mut Context<'_>,
) -> Poll<io::Result<u64>> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    if body.len() == body.capacity() {
        body.reserve(limit.min(BODY_STEP));
    }
    // The future has no state, so it can be dropped while it is pending.
    pin!(transport.read_buf(&mut body.limit(limit))).poll(cx).map_ok(|count| count as u64)
}
