//! The body of a response to a client: bytes of our own, or a worker's, frame by frame.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use thiserror::Error;
use tokio::time::Sleep;

use crate::{
    fleet::worker::Booking, metrics::UpstreamFailure, router::Router, shutdown::InFlight,
    upstream::Connection,
};

/// Why a response that has begun ends early. The client sees its connection close, which is the only
/// honest end: the status has been sent, and a made-up last frame would look like success.
#[derive(Debug, Error)]
pub enum BodyError {
    #[error("the worker's connection broke in the response")]
    Broken(#[source] hyper::Error),
    #[error("the request outlived --request-timeout-secs")]
    Timeout,
    #[error(transparent)]
    Admin(#[from] axum::Error),
}

impl From<Infallible> for BodyError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

/// The one response body of the server.
pub enum ResponseBody {
    Own(Full<Bytes>),
    Admin(axum::body::Body),
    /// Boxed: it carries a connection, and the others are what a mere status needs.
    Worker(Box<WorkerBody>),
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Self::Own(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::from),
            Self::Admin(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::from),
            Self::Worker(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(body) => body.is_end_stream(),
            Self::Admin(body) => body.is_end_stream(),
            Self::Worker(body) => body.incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(body) => body.size_hint(),
            Self::Admin(body) => body.size_hint(),
            Self::Worker(body) => body.incoming.size_hint(),
        }
    }
}

/// A worker's response on its way through. It owns all that its request holds (the connection, the
/// booked load, the place in the drain count), so that dropping it at any moment lets go of all.
pub struct WorkerBody {
    incoming: Incoming,
    /// Until the response is complete; then it is back in the pool.
    connection: Option<Connection>,
    booking: Booking,
    /// Until the first byte: when the request was read.
    waiting_since: Option<Instant>,
    deadline: Pin<Box<Sleep>>,
    router: Arc<Router>,
    _in_flight: InFlight,
}

impl WorkerBody {
    pub fn new(
        incoming: Incoming,
        connection: Connection,
        booking: Booking,
        received: Instant,
        deadline: Pin<Box<Sleep>>,
        router: Arc<Router>,
        in_flight: InFlight,
    ) -> Self {
        let mut body = Self {
            incoming,
            connection: Some(connection),
            booking,
            waiting_since: Some(received),
            deadline,
            router,
            _in_flight: in_flight,
        };
        if body.incoming.is_end_stream() {
            body.finish();
        }
        body
    }

    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        // What is already read goes out first; then the IO gets a turn, and what that has read.
        let mut polled = Pin::new(&mut self.incoming).poll_frame(cx);
        if polled.is_pending()
            && let Some(connection) = &mut self.connection
        {
            let _finished = connection.drive(cx);
            polled = Pin::new(&mut self.incoming).poll_frame(cx);
        }
        match polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(since) = self.waiting_since.take_if(|_| frame.is_data()) {
                    self.booking.prefill_done();
                    self.router.metrics.first_byte.observe(since.elapsed());
                }
                if self.incoming.is_end_stream() {
                    self.finish();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(None) => {
                self.finish();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(error))) => {
                self.connection = None;
                self.router.suspect(self.booking.worker(), UpstreamFailure::Body, &error);
                Poll::Ready(Some(Err(BodyError::Broken(error))))
            }
            Poll::Pending if self.deadline.as_mut().poll(cx).is_ready() => {
                self.connection = None;
                self.router.metrics.upstream_error(UpstreamFailure::Timeout);
                Poll::Ready(Some(Err(BodyError::Timeout)))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    /// The response is complete. Done at its last frame and not on drop: hyper does not ask a body
    /// of known length for the end, and a connection that a client left halfway must not be reused.
    fn finish(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.booking.worker().pool.checkin(connection);
        }
    }
}

impl Drop for WorkerBody {
    fn drop(&mut self) {
        if self.connection.is_some() {
            self.router.metrics.client_abort();
        }
    }
}
