//! What HTTP/1.1 requests and responses share: reading from a connection, header fields, keep-alive.

use std::{
    io,
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::{AsyncRead, ReadBuf};

use super::transport::Transport;

/// Bytes of one read. They are read to the stack and copied, so a connection that waits has no buffer. The head and the
/// body of most requests fit.
const READ: usize = 32 << 10;

/// Reads bytes and appends them to `unread`. Ready with false at the end of the stream.
#[expect(
    clippy::large_stack_arrays,
    reason = "threads have 2 MiB, and this function calls nothing deep"
)]
pub(crate) fn poll_fill(
    transport: &mut Transport,
    unread: &mut Bytes,
    cx: &mut Context<'_>,
) -> Poll<io::Result<bool>> {
    let mut space = [MaybeUninit::uninit(); READ];
    let mut space = ReadBuf::uninit(&mut space);
    ready!(Pin::new(transport).poll_read(cx, &mut space))?;
    let read = space.filled();
    if unread.is_empty() {
        *unread = Bytes::copy_from_slice(read);
    } else {
        let mut joined = BytesMut::with_capacity(unread.len() + read.len());
        joined.extend_from_slice(unread);
        joined.extend_from_slice(read);
        *unread = joined.freeze();
    }
    Poll::Ready(Ok(!read.is_empty()))
}

/// The fields as a map with room for `more`. Their values stay in `bytes`, where they were parsed. Fails with the
/// defect of a malformed field.
pub(crate) fn to_map(
    fields: &[httparse::Header<'_>],
    bytes: &Bytes,
    more: usize,
) -> Result<HeaderMap, &'static str> {
    let mut headers = HeaderMap::with_capacity(fields.len() + more);
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

/// The elements of a comma-separated value.
pub(crate) fn list(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}
