//! The response body as the server writes it. It counts bytes for the request log.

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
    telemetry::{record::End, request_log::RequestLog},
};

/// A response body, counted if the request has a log.
pub(super) struct Answer {
    body: ResponseBody,
    /// Boxed, because most requests have no log.
    tally: Option<Box<Tally>>,
}

/// Counts of the body. They are written to the log at the end, so that no frame takes a lock.
struct Tally {
    log: Arc<RequestLog>,
    first_byte: Option<Instant>,
    bytes: u64,
    end: End,
}

impl Answer {
    pub(super) fn new(body: ResponseBody, log: Option<Arc<RequestLog>>) -> Self {
        let end = if body.is_end_stream() { End::Complete } else { End::default() };
        let tally = |log| Box::new(Tally { log, first_byte: None, bytes: 0, end });
        Self { body, tally: log.map(tally) }
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
            // A body of known length is not polled for its end.
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
        self.log.ended(self.end, self.bytes, self.first_byte);
    }
}
