//! The body of one worker's response, frame by frame.

use std::{
    io,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::SizeHint;
use tokio::time::Instant;

use crate::{
    fleet::{Backend, LoadGuard},
    upstream::Connection,
};

/// The frames. They own the connection and the load guard, so dropping them releases both.
pub struct WorkerFrames {
    /// The start of the body; empty once it is passed on.
    first: Bytes,
    /// Time of arrival of `first`.
    received: Instant,
    /// `None` once the body is complete and its connection is back in the pool.
    rest: Option<Connection>,
    pub guard: Box<LoadGuard>,
}

impl WorkerFrames {
    pub fn new(
        first: Bytes,
        received: Instant,
        rest: Option<Connection>,
        guard: Box<LoadGuard>,
    ) -> Self {
        Self { first, received, rest, guard }
    }

    pub fn backend(&self) -> &Backend {
        self.guard.backend()
    }

    /// The whole body, if it was received before the head was passed on.
    pub fn whole(&self) -> Option<&Bytes> {
        self.rest.is_none().then_some(&self.first)
    }

    /// Whether the worker has sent its last byte.
    pub fn has_ended(&self) -> bool {
        self.rest.is_none()
    }

    /// The next bytes and their time of arrival; `None` at the end of the body.
    pub fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<(Bytes, Instant)>>> {
        if !self.first.is_empty() {
            return Poll::Ready(Some(Ok((std::mem::take(&mut self.first), self.received))));
        }
        let Some(connection) = &mut self.rest else {
            return Poll::Ready(None);
        };
        let data = match ready!(connection.poll_data(cx)) {
            Some(Ok(data)) => data,
            Some(Err(error)) => {
                self.rest = None;
                return Poll::Ready(Some(Err(error)));
            }
            None => {
                self.complete(Instant::now());
                return Poll::Ready(None);
            }
        };
        let now = Instant::now();
        if connection.has_ended() {
            self.complete(now);
        }
        self.backend().received(now);
        Poll::Ready(Some(Ok((data, now))))
    }

    /// Whether the whole body has been passed on.
    pub fn is_complete(&self) -> bool {
        self.first.is_empty() && self.rest.is_none()
    }

    pub fn size_hint(&self) -> SizeHint {
        let first = self.first.len() as u64;
        let Some(connection) = &self.rest else {
            return SizeHint::with_exact(first);
        };
        let rest = connection.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(first + rest.lower());
        if let Some(upper) = rest.upper() {
            hint.set_upper(first + upper);
        }
        hint
    }

    /// Returns the connection to the pool. Called at the last frame and not on drop: the connection of an
    /// incomplete response must not be reused, and a body of known length is not polled for its end.
    fn complete(&mut self, now: Instant) {
        if let Some(connection) = self.rest.take() {
            self.guard.backend().pool.checkin(connection, now.into_std());
        }
    }
}
