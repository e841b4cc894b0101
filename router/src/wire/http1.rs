//! What HTTP/1.1 requests and responses share: reading from a connection, header fields, keep-alive.

use std::{
    io,
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, header};
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

/// Whether the connection stays open after a message with these fields, by its version: 1 for HTTP/1.1, 0 for
/// HTTP/1.0. A message with both kinds of framing may have come from two senders that read it differently.
pub(crate) fn keeps_alive(headers: &HeaderMap, version: u8) -> bool {
    let has = |option: &[u8]| {
        let mut options = headers.get_all(header::CONNECTION).iter().flat_map(list);
        options.any(|sent| sent.eq_ignore_ascii_case(option))
    };
    let is_ambiguous = headers.contains_key(header::TRANSFER_ENCODING)
        && headers.contains_key(header::CONTENT_LENGTH);
    !is_ambiguous && !has(b"close") && (version == 1 || has(b"keep-alive"))
}

/// The elements of a comma-separated value.
pub(crate) fn list(value: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}
