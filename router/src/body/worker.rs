//! What comes from one worker, frame by frame.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, SizeHint};
use tokio::time::Instant;

use crate::{
    fleet::worker::{Booking, Worker},
    proxy::Rest,
};

/// The body of a worker's response. It holds the connection and the booked load, so dropping it at
/// any moment lets go of both.
pub struct WorkerFrames {
    /// Not yet handed on.
    first: Bytes,
    /// `None` once the body is complete; then its connection is back in the pool.
    rest: Option<Rest>,
    pub booking: Booking,
}

impl WorkerFrames {
    pub fn new(first: Bytes, rest: Option<Rest>, booking: Booking) -> Self {
        Self { first, rest, booking }
    }

    pub fn worker(&self) -> &Worker {
        self.booking.worker()
    }

    /// The whole body, if it was there at once and has not been handed on.
    pub fn whole(&self) -> Option<&Bytes> {
        self.rest.is_none().then_some(&self.first)
    }

    /// The worker has nothing more to say.
    pub fn has_ended(&self) -> bool {
        self.rest.is_none()
    }

    /// The next bytes and when they came; `None` at the end of the body.
    pub fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<(Bytes, Instant)>>> {
        if !self.first.is_empty() {
            return Poll::Ready(Some(Ok((std::mem::take(&mut self.first), Instant::now()))));
        }
        let Some(Rest { incoming, connection }) = &mut self.rest else {
            return Poll::Ready(None);
        };
        let data = loop {
            // What is already read goes out first; then the IO gets a turn, and what that has read.
            let mut polled = Pin::new(&mut *incoming).poll_frame(cx);
            if polled.is_pending() {
                let _finished = connection.drive(cx);
                polled = Pin::new(&mut *incoming).poll_frame(cx);
            }
            match ready!(polled).map(|frame| frame.map(http_body::Frame::into_data)) {
                Some(Ok(Ok(data))) => break data,
                // Trailers; nothing behind the router could use them.
                Some(Ok(Err(_))) => {}
                Some(Err(error)) => {
                    self.rest = None;
                    return Poll::Ready(Some(Err(error)));
                }
                None => {
                    self.complete();
                    return Poll::Ready(None);
                }
            }
        };
        if incoming.is_end_stream() {
            self.complete();
        }
        let now = Instant::now();
        self.worker().heard(now);
        Poll::Ready(Some(Ok((data, now))))
    }

    /// All of it has been handed on.
    pub fn is_complete(&self) -> bool {
        self.first.is_empty() && self.rest.is_none()
    }

    pub fn size_hint(&self) -> SizeHint {
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

    /// Done at the last frame and not on drop: hyper does not ask a body of known length for its
    /// end, and a connection that a client left halfway must not be used again.
    fn complete(&mut self) {
        if let Some(Rest { connection, .. }) = self.rest.take() {
            self.booking.worker().pool.checkin(connection);
        }
    }
}
