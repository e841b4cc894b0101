//! The body that the server hands to hyper: a response on its way out, and an eye on how it goes.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::{
    body::{BodyError, ResponseBody},
    server::turn::Turn,
    telemetry::journal::{End, Journal},
};

/// A response body that is counted if there is a journal.
pub(super) struct Answer {
    body: ResponseBody,
    /// Ends with the body; only then is the next request looked at.
    turn: Turn,
    /// Boxed: most requests have none.
    tally: Option<Box<Tally>>,
}

/// Kept here until the end, so that no frame needs a lock.
struct Tally {
    journal: Arc<Journal>,
    first_byte: Option<Instant>,
    bytes: u64,
    end: End,
}

impl Answer {
    pub(super) fn new(body: ResponseBody, turn: Turn, journal: Option<Arc<Journal>>) -> Self {
        let end = if body.is_end_stream() { End::Complete } else { End::default() };
        let tally = |journal| Box::new(Tally { journal, first_byte: None, bytes: 0, end });
        Self { body, turn, tally: journal.map(tally) }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(cx);
        if let (Some(tally), Poll::Ready(frame)) = (&mut this.tally, &polled) {
            match frame {
                Some(Ok(frame)) => tally.count(frame.data_ref().map_or(0, Bytes::len)),
                Some(Err(_)) => tally.end = End::Broken,
                None => tally.end = End::Complete,
            }
            // hyper does not ask a body of known length for its end.
            if tally.end == End::ClientGone && this.body.is_end_stream() {
                tally.end = End::Complete;
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.turn.end();
    }
}

impl Tally {
    fn count(&mut self, bytes: usize) {
        if bytes > 0 {
            self.first_byte.get_or_insert_with(Instant::now);
            self.bytes += bytes as u64;
        }
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.journal.ended(self.end, self.bytes, self.first_byte);
    }
}
