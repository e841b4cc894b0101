//! One request at a time over a shared HTTP/2 connection. The I/O of the connection has a task of its own, because
//! requests of several tasks share it. Dropping a request resets its stream.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Uri, header, response::Parts};
use http_body::{Body, SizeHint};
use http_body_util::Full;
use hyper::{body::Incoming, client::conn::http2::SendRequest};

use crate::names::WorkerUrl;

/// A handle of the connection.
#[derive(Debug)]
pub(super) struct Http2 {
    sender: SendRequest<Full<Bytes>>,
    /// Scheme and authority. They are part of every request.
    origin: Uri,
    /// The rest of the present response.
    body: Option<Incoming>,
}

impl Http2 {
    pub(super) fn new(sender: SendRequest<Full<Bytes>>, url: &WorkerUrl) -> Self {
        let origin = url.as_str().parse().expect("contract: a URL that was parsed before");
        Self { sender, origin, body: None }
    }

    /// Another handle of the connection, if it is open.
    pub(super) fn share(&self) -> Option<Self> {
        let (sender, origin) = (self.sender.clone(), self.origin.clone());
        (!sender.is_closed()).then_some(Self { sender, origin, body: None })
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
