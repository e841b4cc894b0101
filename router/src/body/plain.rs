//! A worker's response that is not a stream of events: it passes as it comes.

use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::response::Parts;
use http_body::SizeHint;

use crate::{
    body::{failure::Failure, usage, worker::WorkerFrames},
    fleet::worker::Outcome,
    proxy::Job,
};

/// It owns all that its request holds, so that dropping it at any moment lets go of all.
pub struct PlainBody {
    frames: WorkerFrames,
    job: Job,
    failed: bool,
}

impl PlainBody {
    pub fn new(job: Job, head: &Parts, mut frames: WorkerFrames) -> Self {
        let mut usage = usage::Reader::new(&job, &head.headers, &mut frames.booking);
        // A longer answer than is read whole before its head goes out is not searched.
        if let Some(whole) = frames.whole().cloned() {
            usage.look(&job, &mut frames.booking, &whole);
            if head.status.is_success() {
                usage.ends(&frames.booking);
            }
        }
        note_end(&mut frames);
        Self { frames, job, failed: false }
    }

    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        let failure = match self.frames.poll_next(cx) {
            Poll::Ready(Some(Ok((bytes, _)))) => {
                note_end(&mut self.frames);
                return Poll::Ready(Some(Ok(bytes)));
            }
            Poll::Ready(None) => {
                note_end(&mut self.frames);
                return Poll::Ready(None);
            }
            Poll::Ready(Some(Err(error))) => Failure::Broken(error),
            Poll::Pending => {
                ready!(self.job.alarm.poll(self.job.deadline, cx));
                Failure::Timeout
            }
        };
        self.failed = true;
        failure.blame(&self.job.router, &mut self.frames.booking);
        Poll::Ready(Some(Err(failure)))
    }

    pub fn is_complete(&self) -> bool {
        self.frames.is_complete()
    }

    pub fn size_hint(&self) -> SizeHint {
        self.frames.size_hint()
    }
}

/// Counts the answer as one when all of it has come.
fn note_end(frames: &mut WorkerFrames) {
    if frames.has_ended() {
        frames.booking.record(Outcome::Answered);
    }
}

impl Drop for PlainBody {
    fn drop(&mut self) {
        if !self.failed && !self.is_complete() {
            self.job.router.metrics.client_abort();
        }
    }
}
