//! The body of a response to a client: bytes of our own, or a worker's, frame by frame.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::response::Parts;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use thiserror::Error;

use crate::{
    fleet::worker::Booking,
    metrics::UpstreamFailure,
    proxy::{Job, Reply, Rest},
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
            Self::Worker(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(body) => body.size_hint(),
            Self::Admin(body) => body.size_hint(),
            Self::Worker(body) => body.size_hint(),
        }
    }
}

/// A worker's response on its way through. It owns all that its request holds (the connection, the
/// booked load, the place in the drain count), so that dropping it at any moment lets go of all.
pub struct WorkerBody {
    /// Not yet handed on.
    first: Bytes,
    /// `None` once the response is complete; its connection is back in the pool.
    rest: Option<Rest>,
    booking: Booking,
    job: Job,
}

impl WorkerBody {
    /// The head of the response goes out with it.
    pub fn new(job: Job, reply: Reply) -> (Parts, Self) {
        let Reply { head, first, rest, booking } = reply;
        (head, Self { first, rest, booking, job })
    }

    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if !self.first.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.first)))));
        }
        let Some(Rest { incoming, connection }) = &mut self.rest else {
            return Poll::Ready(None);
        };
        // What is already read goes out first; then the IO gets a turn, and what that has read.
        let mut polled = Pin::new(&mut *incoming).poll_frame(cx);
        if polled.is_pending() {
            let _finished = connection.drive(cx);
            polled = Pin::new(&mut *incoming).poll_frame(cx);
        }
        match polled {
            Poll::Ready(Some(Ok(frame))) => {
                if incoming.is_end_stream() {
                    self.finish();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(None) => {
                self.finish();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(error))) => {
                self.rest = None;
                self.job.router.suspect(self.booking.worker(), UpstreamFailure::Body, &error);
                Poll::Ready(Some(Err(BodyError::Broken(error))))
            }
            Poll::Pending => {
                ready!(self.job.alarm.poll(self.job.deadline, cx));
                self.rest = None;
                self.job.router.metrics.upstream_error(UpstreamFailure::Timeout);
                Poll::Ready(Some(Err(BodyError::Timeout)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_empty() && self.rest.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.len() as u64;
        let Some(Rest { incoming, .. }) = &self.rest else {
            return SizeHint::with_exact(first);
        };
        let rest = incoming.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(first + rest.lower());
        if let Some(upper) = rest.upper() {
            hint.set_upper(first + upper);
        }
        hint
    }

    /// The response is complete. Done at its last frame and not on drop: hyper does not ask a body
    /// of known length for the end, and a connection that a client left halfway must not be reused.
    fn finish(&mut self) {
        if let Some(Rest { connection, .. }) = self.rest.take() {
            self.booking.worker().pool.checkin(connection);
        }
    }
}

impl Drop for WorkerBody {
    fn drop(&mut self) {
        if self.rest.is_some() {
            self.job.router.metrics.client_abort();
        }
    }
}
