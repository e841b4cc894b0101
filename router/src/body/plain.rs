//! A response of a worker that is not a stream of events. It is passed on unchanged.

use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::response::Parts;
use http_body::SizeHint;

use crate::{
    body::{failure::Failure, usage, worker::WorkerFrames},
    fleet::Outcome,
    proxy::Job,
};

/// The body. It owns all resources of its request, so dropping it releases them.
pub struct PlainBody {
    frames: WorkerFrames,
    job: Box<Job>,
    failed: bool,
}

impl PlainBody {
    pub fn new(job: Box<Job>, head: &Parts, mut frames: WorkerFrames) -> Self {
        let mut usage = usage::Reader::new(&job, &head.headers, &mut frames.guard);
        // A longer answer is sent in parts, and is not searched for counts.
        if let Some(whole) = frames.whole().cloned() {
            usage.read(&job, &mut frames.guard, &whole);
            if head.status.is_success() {
                usage.ends(&frames.guard);
            }
        }
        record_end(&mut frames);
        Self { frames, job, failed: false }
    }

    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        let had_ended = self.frames.has_ended();
        let failure = match self.frames.poll_next(cx) {
            Poll::Ready(Some(Err(error))) => Failure::Broken(error),
            Poll::Ready(next) => {
                if !had_ended {
                    record_end(&mut self.frames);
                }
                return Poll::Ready(next.and_then(Result::ok).map(|(bytes, _)| Ok(bytes)));
            }
            Poll::Pending => {
                ready!(self.job.timer.poll(self.job.deadline, cx));
                Failure::Timeout
            }
        };
        self.failed = true;
        failure.record_on_worker(&self.job.router, &mut self.frames.guard);
        Poll::Ready(Some(Err(failure)))
    }

    pub fn is_complete(&self) -> bool {
        self.frames.is_complete()
    }

    pub fn size_hint(&self) -> SizeHint {
        self.frames.size_hint()
    }
}

/// Records a complete answer on the worker once the last frame has come.
fn record_end(frames: &mut WorkerFrames) {
    if frames.has_ended() {
        frames.guard.record(Outcome::Answered);
    }
}

impl Drop for PlainBody {
    fn drop(&mut self) {
        if !self.failed && !self.is_complete() {
            self.job.router.metrics.client_abort();
        }
    }
}
