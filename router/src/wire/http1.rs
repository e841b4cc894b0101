//! What HTTP/1.1 requests and responses share: reading from a connection, header fields, keep-alive.

use std::{
    cell::Cell,
    io, mem,
    pin::pin,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::AsyncReadExt;

use super::transport::Transport;

/// Bytes of one read. The head and the body of most requests fit.
const READ: usize = 32 << 10;

/// A read of at least this many bytes keeps the buffer, which a request may hold until its response ends. Fewer bytes are
/// copied to one of their size.
const KEEPS_BUFFER: usize = READ / 2;

thread_local! {
    /// The buffer for the next read of this thread. A connection that waits has none.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Reads bytes and appends them to `unread`. Ready with false at the end of the stream.
pub(crate) fn poll_fill(
    transport: &mut Transport,
    unread: &mut Bytes,
    cx: &mut Context<'_>,
) -> Poll<io::Result<bool>> {
    let mut read = BUFFER.take();
    read.reserve_exact(READ);
    // The future has no state, so it can be dropped while it is pending.
    let polled = pin!(transport.read_buf(&mut read)).poll(cx);
    match read.len() {
        0 => {}
        KEEPS_BUFFER.. if unread.is_empty() => *unread = mem::take(&mut read).into(),
        _ if unread.is_empty() => *unread = Bytes::copy_from_slice(&read),
        _ => {
            let mut joined = BytesMut::with_capacity(unread.len() + read.len());
            joined.extend_from_slice(unread);
            joined.extend_from_slice(&read);
            *unread = joined.freeze();
        }
    }
    read.clear();
    BUFFER.set(read);
    polled.map_ok(|count| count > 0)
}

/// The fields as a map of `capacity`. Their values stay in `bytes`, where they were parsed. Fails with the defect of a
/// malformed field.
pub(crate) fn to_map<'a>(
    fields: impl Iterator<Item = &'a httparse::Header<'a>>,
    bytes: &Bytes,
    capacity: usize,
) -> Result<HeaderMap, &'static str> {
    let mut headers = HeaderMap::with_capacity(capacity);
    for field in fields {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| "a malformed name")?;
        let value = HeaderValue::from_maybe_shared(bytes.slice_ref(field.value));
        headers.append(name, value.map_err(|_| "a malformed value")?);
    }
    Ok(headers)
}

/// The options in the field `Connection` of a message.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ConnectionOptions {
    closes: bool,
    keeps_alive: bool,
}

impl ConnectionOptions {
    /// Reads one of these fields.
    pub(crate) fn read(&mut self, value: &[u8]) {
        for option in list(value) {
            self.closes |= option.eq_ignore_ascii_case(b"close");
            self.keeps_alive |= option.eq_ignore_ascii_case(b"keep-alive");
        }
    }

    /// Whether the connection stays open after the message, by its version: 1 for HTTP/1.1, 0 for HTTP/1.0.
    pub(crate) fn keeps_alive(self, version: u8) -> bool {
        !self.closes && (version == 1 || self.keeps_alive)
    }
}

/// The number in a field such as `Content-Length`. `None` if it is malformed, or has more than 18 digits: these fit into
/// u64.
pub(crate) fn number(text: &[u8]) -> Option<u64> {
    let is_number = (1..=18).contains(&text.len()) && text.iter().all(u8::is_ascii_digit);
    let number = || text.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0'));
    is_number.then(number)
}

/// The elements of a comma-separated value.
pub(crate) fn list(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}
