//! A connection to a worker, with the present request on it: HTTP/1.1 ([`http1`](super::http1)), or a handle of a
//! shared HTTP/2 connection ([`http2`](super::http2)).

use std::{
    future::poll_fn,
    io,
    task::{Context, Poll},
    time::Instant,
};

use bytes::{Bytes, BytesMut};
use http::response::Parts;
use http_body::SizeHint;

use super::{OutgoingRequest, UpstreamError, http1::Http1, http2::Http2};

#[derive(Debug)]
pub struct Connection {
    protocol: Protocol,
    opened_at: Instant,
}

#[derive(Debug)]
enum Protocol {
    /// Boxed, because it is moved often.
    Http1(Box<Http1>),
    Http2(Box<Http2>),
}

/// Calls the same method of either protocol.
macro_rules! either {
    ($protocol:expr, $connection:ident => $call:expr) => {
        match $protocol {
            Protocol::Http1($connection) => $call,
            Protocol::Http2($connection) => $call,
        }
    };
}

impl Connection {
    pub(super) fn http1(connection: Http1) -> Self {
        Self { protocol: Protocol::Http1(Box::new(connection)), opened_at: Instant::now() }
    }

    pub(super) fn http2(connection: Http2) -> Self {
        Self { protocol: Protocol::Http2(Box::new(connection)), opened_at: Instant::now() }
    }

    /// Another handle of the connection, if it can be shared, is open and can take another request.
    pub(super) fn share(&self) -> Option<Self> {
        match &self.protocol {
            Protocol::Http1(_) => None,
            Protocol::Http2(shared) => {
                let protocol = Protocol::Http2(Box::new(shared.share()?));
                Some(Self { protocol, opened_at: self.opened_at })
            }
        }
    }

    /// Whether a shared connection is open. Call it, as `is_used`, on the pool's handle.
    pub(super) fn is_open(&self) -> bool {
        matches!(&self.protocol, Protocol::Http2(shared) if shared.is_open())
    }

    /// Whether a shared connection has requests.
    pub(super) fn is_used(&self) -> bool {
        matches!(&self.protocol, Protocol::Http2(shared) if shared.streams() > 0)
    }

    /// Sends a request and waits for the head of its response. If the future is dropped, the connection must be
    /// dropped as well.
    pub fn send(
        &mut self,
        request: &OutgoingRequest<'_>,
    ) -> impl Future<Output = Result<Box<Parts>, UpstreamError>> + use<'_> {
        enum Sending<A, B> {
            Http1(A),
            Http2(B),
        }
        // Outside of the future, which would keep room for the request.
        let sending = match &mut self.protocol {
            Protocol::Http1(connection) => Sending::Http1(connection.send(request)),
            Protocol::Http2(shared) => Sending::Http2(Box::pin(shared.send(request.to_request()))),
        };
        async {
            match sending {
                Sending::Http1(sending) => sending.await,
                Sending::Http2(sending) => sending.await.map(Box::new),
            }
            .map_err(UpstreamError::Reset)
        }
    }

    /// The next bytes of the response body; `None` at its end. After an error the connection must be dropped.
    pub fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        either!(&mut self.protocol, connection => connection.poll_data(cx))
    }

    /// The same as a future.
    pub async fn next_data(&mut self) -> Result<Option<Bytes>, UpstreamError> {
        poll_fn(|cx| self.poll_data(cx)).await.transpose().map_err(UpstreamError::Cut)
    }

    /// Reads a response body of at most `limit` bytes.
    pub async fn read(&mut self, limit: usize) -> Result<Bytes, UpstreamError> {
        let mut whole = BytesMut::new();
        while let Some(data) = self.next_data().await? {
            if whole.len() + data.len() > limit {
                return Err(UpstreamError::TooLarge(limit));
            }
            whole.extend_from_slice(&data);
        }
        Ok(whole.freeze())
    }

    /// Whether the response has been read to its end. A chunked body may end without further data.
    pub fn has_ended(&self) -> bool {
        either!(&self.protocol, connection => connection.has_ended())
    }

    /// The number of bytes of the response body that have not been returned.
    pub fn size_hint(&self) -> SizeHint {
        either!(&self.protocol, connection => connection.size_hint())
    }

    pub fn opened_at(&self) -> Instant {
        self.opened_at
    }

    /// Whether the connection serves one request at a time, and the last response was read.
    pub(super) fn is_idle(&self) -> bool {
        match &self.protocol {
            Protocol::Http1(connection) => connection.is_idle(),
            Protocol::Http2(_) => false,
        }
    }

    /// Whether the connection is idle and can take another request: it is still open.
    pub(super) fn is_reusable(&mut self) -> bool {
        match &mut self.protocol {
            Protocol::Http1(connection) => connection.is_reusable(),
            Protocol::Http2(_) => false,
        }
    }
}
