//! The wait of a request for the start of its response. A request waits for a slow worker. It moves to another worker,
//! if there is one, when its worker has sent no byte of any response for longer than expected.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::atomic::{AtomicBool, Ordering},
    task::Poll,
};

use tokio::time::Instant;

use super::{attempt_error::AttemptError, peek::PeekedResponse};
use crate::{
    deadline_timer::DeadlineTimer,
    engine::expect::Expect,
    fleet::{LoadGuard, Outcome},
};

type Asked = Result<PeekedResponse, AttemptError>;

/// A streamed request leaves a worker that still serves other requests after this multiple of its time limit.
const OVERDUE_FACTOR: u32 = 3;

pub(super) struct Waiting<'a> {
    pub(super) timer: &'a mut DeadlineTimer,
    /// Deadline of the request.
    pub(super) deadline: Instant,
    pub(super) expect: Expect,
    /// Set by the future that is awaited, when the worker reports that the prompt is computed.
    pub(super) prefilled: &'a AtomicBool,
}

impl Waiting<'_> {
    /// Returns the result of `asking`, or the error for a wait that is given up. `may_leave` tells whether the
    /// request may go to another worker, and takes the retry from the budget.
    pub(super) async fn on(
        self,
        guard: &mut LoadGuard,
        mut asking: Pin<&mut impl Future<Output = Asked>>,
        may_leave: impl Fn() -> bool,
    ) -> Asked {
        let begun = guard.reserved_at();
        let streamed = self.expect.is_stream();
        if !streamed {
            // The first byte comes after the last token. Without this limit the prompt would count as load until then.
            let at = self.deadline.min(begun + guard.expected_prefill());
            let prefilled = poll_fn(|cx| match asking.as_mut().poll(cx) {
                Poll::Pending if self.prefilled.load(Ordering::Relaxed) => Poll::Ready(None),
                polled => polled.map(Some),
            });
            if let Some(Some(outcome)) = self.timer.limit(at, prefilled).await {
                return outcome;
            }
            guard.prefill_done(false);
        }
        let backend = guard.backend().clone();
        for round in 1.. {
            let limit = if streamed { guard.first_token_limit() } else { backend.limits.answer() };
            let Some(at) = begun.checked_add(limit.saturating_mul(round)) else { break };
            if at >= self.deadline {
                break;
            }
            if let Some(outcome) = self.timer.limit(at, asking.as_mut()).await {
                return outcome;
            }
            let silent = backend.is_silent_for(limit);
            let overdue = streamed && round >= OVERDUE_FACTOR && !backend.makes_progress();
            if (silent || overdue) && may_leave() {
                return Err(AttemptError::Late(limit));
            }
            guard.record(Outcome::Late(limit));
        }
        self.timer.limit(self.deadline, asking).await.unwrap_or(Err(AttemptError::Deadline))
    }
}
