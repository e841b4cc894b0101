//! The body of a response to a client: the router's own, or the body of a worker.
//!
//! [`plain`] passes the bytes of a worker on as they come. [`stream`] handles server-sent events: it fills silence
//! ([`silence`]), and continues a broken stream on another worker ([`replay`]) or ends it with an error
//! ([`failure`]). [`usage`] reads the token counts in both. [`worker`] is the source of the bytes.

pub mod failure;
pub mod plain;
pub mod replay;
pub mod silence;
pub mod stream;
pub mod usage;
pub mod worker;

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use thiserror::Error;

use crate::{
    body::{failure::Failure, plain::PlainBody, stream::EventStream, worker::WorkerFrames},
    engine::continuation,
    proxy::{Job, Reply},
};

/// The error of a body that cannot be completed. The connection to the client is closed: made-up bytes would look
/// like success. A stream of events ends with an error event instead.
#[derive(Debug, Error)]
pub enum BodyError {
    #[error(transparent)]
    Worker(#[from] Failure),
    #[error(transparent)]
    Admin(#[from] axum::Error),
}

impl From<Infallible> for BodyError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

/// The response body of the server.
pub enum ResponseBody {
    /// A response of the router, such as an error.
    Own(Full<Bytes>),
    /// A response of an admin route.
    Admin(axum::body::Body),
    /// A body of a worker that is passed on. Boxed, because it holds a connection and the other variants are small.
    Plain(Box<PlainBody>),
    /// A stream of events of a worker.
    Events(Box<EventStream>),
}

impl ResponseBody {
    /// Builds the response to `job` from the reply of a worker.
    pub fn of_worker(job: Box<Job>, reply: Reply) -> Response<Self> {
        let Reply { mut head, first, received, rest, guard, asked_usage } = reply;
        // Observed here and not in `proxy`: a continued stream has had its first byte before.
        let waited = received.saturating_duration_since(job.received);
        let metrics = &job.router.metrics;
        metrics.first_byte.observe(waited);
        let frames = WorkerFrames::new(first, received, rest, guard);
        let body = if stream::is_event_stream(&head) {
            metrics.first_token.observe(waited);
            Self::Events(Box::new(EventStream::new(job, &mut head, frames, asked_usage)))
        } else {
            head.headers.remove(continuation::HEADER);
            Self::Plain(Box::new(PlainBody::new(job, &head, frames)))
        };
        Response::from_parts(*head, body)
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let next = match self.get_mut() {
            Self::Own(body) => return Pin::new(body).poll_frame(cx).map_err(BodyError::from),
            Self::Admin(body) => return Pin::new(body).poll_frame(cx).map_err(BodyError::from),
            Self::Plain(body) => body.poll_next(cx),
            Self::Events(body) => body.poll_next(cx),
        };
        next.map(|next| next.map(|bytes| bytes.map(Frame::data).map_err(BodyError::from)))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(body) => body.is_end_stream(),
            Self::Admin(body) => body.is_end_stream(),
            Self::Plain(body) => body.is_complete(),
            Self::Events(body) => body.is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(body) => body.size_hint(),
            Self::Admin(body) => body.size_hint(),
            Self::Plain(body) => body.size_hint(),
            Self::Events(_) => SizeHint::default(),
        }
    }
}
