//! The body of a response to a client: bytes of our own, or a worker's.
//!
//! [`plain`] passes a worker's bytes as they come. [`stream`] knows events: it fills
//! [`silence`], and continues a broken stream on another worker ([`replay`], from the [`transcript`] of
//! what the client has) or ends it with a [`failure`]. [`usage`] is what the router learns from both in
//! passing; [`asked_usage`] takes out what it has asked for itself. [`worker`] is where the bytes come from.

mod asked_usage;
pub mod failure;
pub mod plain;
pub mod replay;
pub mod silence;
pub mod stream;
pub mod transcript;
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
    proxy::{self, Job, Reply},
};

/// Why a response that has begun ends early. The client sees its connection close: bytes that were
/// made up would look like success. A stream of events has a better way, an event that says so.
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

/// The one response body of the server.
pub enum ResponseBody {
    Own(Full<Bytes>),
    Admin(axum::body::Body),
    /// Boxed: they carry a connection, and the others are what a mere status needs.
    Plain(Box<PlainBody>),
    Events(Box<EventStream>),
}

impl ResponseBody {
    /// The response to `job`, whose beginning is `reply`.
    pub fn of_worker(job: Job, reply: Reply) -> Response<Self> {
        // Here and not where workers are asked: a continued stream has had its first byte.
        let (metrics, waited) = (&job.router.metrics, job.received.elapsed());
        metrics.first_byte.observe(waited);
        if stream::is_event_stream(&reply.head) {
            metrics.first_token.observe(waited);
        }
        let Reply { mut head, first, rest, booking, asked_usage } = reply;
        let frames = WorkerFrames::new(first, rest, booking);
        let body = if stream::is_event_stream(&head) {
            Self::Events(Box::new(EventStream::new(job, &mut head, frames, asked_usage)))
        } else {
            head.headers.remove(proxy::replay::HEADER);
            Self::Plain(Box::new(PlainBody::new(job, &head, frames)))
        };
        Response::from_parts(head, body)
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
