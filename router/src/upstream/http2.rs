//! One request at a time over a shared HTTP/2 connection. The I/O of the connection has a task of its own, because
//! requests of several tasks share it. Dropping a request resets its stream.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Uri, header, response::Parts};
use http_body::{Body, SizeHint};
use http_body_util::Full;
use hyper::{
    body::Incoming,
    client::conn::http2::{self, SendRequest},
};
use hyper_util::rt::{TokioExecutor, TokioIo};

use crate::{names::WorkerUrl, wire::transport::Transport};

/// A connection without requests has two handles: one in the pool, and one in the task that runs its I/O.
const IDLE_HANDLES: usize = 2;

/// A handle of the connection.
#[derive(Debug)]
pub(super) struct Http2 {
    sender: SendRequest<Full<Bytes>>,
    /// Scheme and authority. They are part of every request.
    origin: Uri,
    /// Maximum number of streams at a time, by the worker's settings. Each handle has a reference, so it counts them as well.
    max_streams: Arc<AtomicUsize>,
    /// The rest of the present response.
    body: Option<Incoming>,
}

impl Http2 {
    /// Takes the connection of a handshake, and runs its I/O until all senders are dropped or the worker closes it.
    pub(super) fn run(
        sender: SendRequest<Full<Bytes>>,
        mut driver: http2::Connection<TokioIo<Transport>, Full<Bytes>, TokioExecutor>,
        url: &WorkerUrl,
    ) -> Self {
        let origin = url.as_str().parse().expect("contract: a URL that was parsed before");
        let max_streams = Arc::new(AtomicUsize::new(driver.current_max_send_streams()));
        let told = Arc::clone(&max_streams);
        tokio::spawn(poll_fn(move |cx| {
            let polled = Pin::new(&mut driver).poll(cx);
            told.store(driver.current_max_send_streams(), Ordering::Relaxed);
            polled
        }));
        Self { sender, origin, max_streams, body: None }
    }

    /// Another handle of the connection, if it is open and can take another stream.
    pub(super) fn share(&self) -> Option<Self> {
        let has_room = self.streams() < self.max_streams.load(Ordering::Relaxed);
        (self.is_open() && has_room).then(|| Self {
            sender: self.sender.clone(),
            origin: self.origin.clone(),
            max_streams: Arc::clone(&self.max_streams),
            body: None,
        })
    }

    pub(super) fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }

    /// The number of requests on the connection. Call it on the pool's handle.
    pub(super) fn streams(&self) -> usize {
        Arc::strong_count(&self.max_streams).saturating_sub(IDLE_HANDLES)
    }

    /// Sends a request and waits for the head of its response.
    pub(super) async fn send(&mut self, request: Request<Bytes>) -> io::Result<Parts> {
        let mut request = request.map(Full::new);
        let mut target = self.origin.clone().into_parts();
        target.path_and_query = request.uri().path_and_query().cloned();
        *request.uri_mut() = Uri::from_parts(target).expect("contract: parts of valid URIs");
        // The host is part of the target in HTTP/2.
        request.headers_mut().remove(header::HOST);
        self.sender.ready().await.map_err(io::Error::other)?;
        let response = self.sender.send_request(request).await.map_err(io::Error::other)?;
        let (parts, body) = response.into_parts();
        self.body = Some(body);
        Ok(parts)
    }

    /// The next bytes of the response body; `None` at its end.
    pub(super) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        while let Some(body) = &mut self.body {
            match ready!(Pin::new(body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    // Trailers are dropped: no client uses them.
                    if let Ok(data) = frame.into_data() {
                        return Poll::Ready(Some(Ok(data)));
                    }
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(io::Error::other(error)))),
                None => self.body = None,
            }
        }
        Poll::Ready(None)
    }

    /// Whether the response has been read to its end.
    pub(super) fn has_ended(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    /// The number of bytes of the body that have not been returned.
    pub(super) fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), Incoming::size_hint)
    }
}
