//! One connection to a worker.
//!
//! hyper splits a connection into a sender for requests and a future that does the I/O. Usually that future is
//! spawned. Here, an HTTP/1.1 connection keeps both, and the task that waits for the response drives the I/O: one
//! task for each request instead of two, no hand-over between threads, and an abort without code, because dropping
//! the request drops the socket. An HTTP/2 connection has requests of several tasks, so its I/O has a task of its
//! own, and dropping a request resets its stream.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::Instant,
};

use bytes::{Bytes, BytesMut};
use http::{Request, Response, Uri, header};
use http_body::Body;
use http_body_util::Full;
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::TokioIo;

use super::UpstreamError;
use crate::{names::WorkerUrl, wire::transport::Transport};

#[derive(Debug)]
pub struct Connection {
    protocol: Protocol,
    opened_at: Instant,
}

#[derive(Debug)]
enum Protocol {
    /// Boxed, because it is moved often.
    Http1(Box<Http1>),
    Http2(Http2),
}

/// An HTTP/1.1 connection with its I/O.
#[derive(Debug)]
struct Http1 {
    sender: http1::SendRequest<Full<Bytes>>,
    /// `None` once the future has finished. It is dropped then: a request that it has not taken fails only when it
    /// is dropped.
    driver: Option<http1::Connection<TokioIo<Transport>, Full<Bytes>>>,
}

/// A handle of a shared HTTP/2 connection.
#[derive(Clone, Debug)]
struct Http2 {
    sender: http2::SendRequest<Full<Bytes>>,
    /// Scheme and authority. They are part of every request.
    origin: Uri,
}

impl Connection {
    pub(super) fn http1(
        sender: http1::SendRequest<Full<Bytes>>,
        driver: http1::Connection<TokioIo<Transport>, Full<Bytes>>,
    ) -> Self {
        let protocol = Protocol::Http1(Box::new(Http1 { sender, driver: Some(driver) }));
        Self { protocol, opened_at: Instant::now() }
    }

    pub(super) fn http2(sender: http2::SendRequest<Full<Bytes>>, url: &WorkerUrl) -> Self {
        let origin = url.as_str().parse().expect("contract: a URL that was parsed before");
        Self { protocol: Protocol::Http2(Http2 { sender, origin }), opened_at: Instant::now() }
    }

    /// Another handle of the connection, if it can be shared and is open.
    pub(super) fn share(&self) -> Option<Self> {
        match &self.protocol {
            Protocol::Http2(shared) if !shared.sender.is_closed() => {
                let protocol = Protocol::Http2(shared.clone());
                Some(Self { protocol, opened_at: self.opened_at })
            }
            _ => None,
        }
    }

    /// Sends a request and waits for the head of its response. The body arrives while [`Connection::drive`] is
    /// called. If the future is dropped, the connection must be dropped as well.
    pub async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, UpstreamError> {
        match &mut self.protocol {
            Protocol::Http1(connection) => connection.send(request).await,
            Protocol::Http2(shared) => Box::pin(shared.send(request)).await,
        }
        .map_err(UpstreamError::Reset)
    }

    /// The next bytes of a response body; `None` at its end.
    pub async fn next_data(&mut self, body: &mut Incoming) -> Result<Option<Bytes>, UpstreamError> {
        loop {
            let frame = poll_fn(|cx| {
                // Bytes in the buffer first; then the I/O runs, and its bytes follow.
                let polled = Pin::new(&mut *body).poll_frame(cx);
                if polled.is_ready() {
                    return polled;
                }
                let _finished = self.drive(cx);
                Pin::new(&mut *body).poll_frame(cx)
            });
            let Some(frame) = frame.await else {
                return Ok(None);
            };
            // Trailers are dropped: no client uses them.
            if let Ok(data) = frame.map_err(UpstreamError::Cut)?.into_data() {
                return Ok(Some(data));
            }
        }
    }

    /// Reads a response body of at most `limit` bytes.
    pub async fn read(
        &mut self,
        body: &mut Incoming,
        limit: usize,
    ) -> Result<Bytes, UpstreamError> {
        let mut whole = BytesMut::new();
        while let Some(data) = self.next_data(body).await? {
            if whole.len() + data.len() > limit {
                return Err(UpstreamError::TooLarge(limit));
            }
            whole.extend_from_slice(&data);
        }
        Ok(whole.freeze())
    }

    /// Does the I/O that is possible now. Ready when the connection has ended.
    pub fn drive(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.protocol {
            Protocol::Http1(connection) => connection.drive(cx),
            Protocol::Http2(_) => Poll::Pending,
        }
    }

    pub fn opened_at(&self) -> Instant {
        self.opened_at
    }

    /// Whether the connection serves one request at a time and can take another one: it is open, and the last
    /// response was read.
    pub(super) fn is_reusable(&mut self) -> bool {
        let Protocol::Http1(connection) = &mut self.protocol else {
            return false;
        };
        // One poll detects a connection that the worker has closed. No task is woken by it.
        let mut nobody = Context::from_waker(Waker::noop());
        connection.drive(&mut nobody).is_pending() && connection.sender.is_ready()
    }
}

impl Http1 {
    /// Not an async function, whose future would reserve room for the request.
    fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> impl Future<Output = Result<Response<Incoming>, hyper::Error>> {
        let response = self.sender.send_request(request);
        let driver = &mut self.driver;
        async move {
            let mut response = pin!(response);
            poll_fn(|cx| {
                // The I/O first: the response waits for its bytes.
                let _finished = drive(driver, cx);
                response.as_mut().poll(cx)
            })
            .await
        }
    }

    fn drive(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        drive(&mut self.driver, cx)
    }
}

/// A free function, so that a request in progress may borrow the sender.
fn drive(driver: &mut Option<impl Future + Unpin>, cx: &mut Context<'_>) -> Poll<()> {
    if let Some(running) = driver {
        let _outcome = std::task::ready!(Pin::new(running).poll(cx));
        *driver = None;
    }
    Poll::Ready(())
}

impl Http2 {
    async fn send(
        &mut self,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, hyper::Error> {
        let mut target = self.origin.clone().into_parts();
        target.path_and_query = request.uri().path_and_query().cloned();
        *request.uri_mut() = Uri::from_parts(target).expect("contract: parts of valid URIs");
        // The host is part of the target in HTTP/2.
        request.headers_mut().remove(header::HOST);
        self.sender.ready().await?;
        self.sender.send_request(request).await
    }
}
