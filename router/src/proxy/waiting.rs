//! How long a request waits on one worker for the beginning of its answer. A worker that is slow is
//! waited for; one that is silent as a whole for longer than it should be is left, if there is another.

use std::pin::Pin;

use tokio::{sync::Notify, time::Instant};

use super::{beginning::Beginning, exchange::Trouble, expect::Expect};
use crate::{
    alarm::Alarm,
    fleet::worker::{Booking, Outcome},
};

type Asked = Result<Beginning, Trouble>;

/// A streamed request on a worker that serves others is left after this many times its limit.
const OVERDUE: u32 = 3;

pub(super) struct Waiting<'a> {
    pub(super) alarm: &'a mut Alarm,
    /// Of the request.
    pub(super) deadline: Instant,
    pub(super) expect: Expect,
    /// Rings when the worker says that the prompt is computed.
    pub(super) prefilled: &'a Notify,
}

impl Waiting<'_> {
    /// What `asking` resolves to, or why it is not waited for any longer. `may_leave` says whether
    /// the request may go elsewhere, and pays for it.
    pub(super) async fn on(
        self,
        booking: &mut Booking,
        mut asking: Pin<&mut impl Future<Output = Asked>>,
        may_leave: impl Fn() -> bool,
    ) -> Asked {
        let begun = Instant::now();
        let streamed = self.expect.is_stream();
        if !streamed {
            // The first byte comes with the last, and the prompt's tokens must not count as load until
            // then.
            let at = self.deadline.min(begun + booking.expected_prefill());
            let prefilled = async {
                tokio::select! {
                    biased;
                    outcome = asking.as_mut() => Some(outcome),
                    () = self.prefilled.notified() => None,
                }
            };
            if let Some(Some(outcome)) = self.alarm.limit(at, prefilled).await {
                return outcome;
            }
            booking.prefill_done(false);
        }
        let worker = booking.worker().clone();
        for round in 1.. {
            let limit = if streamed { booking.first_token_limit() } else { worker.answer_limit() };
            let Some(at) = begun.checked_add(limit.saturating_mul(round)) else { break };
            if at >= self.deadline {
                break;
            }
            if let Some(outcome) = self.alarm.limit(at, asking.as_mut()).await {
                return outcome;
            }
            let silent = worker.is_silent_for(limit);
            let overdue = streamed && round >= OVERDUE && !worker.makes_progress();
            if (silent || overdue) && may_leave() {
                return Err(Trouble::Late(limit));
            }
            booking.record(Outcome::Late(limit));
        }
        self.alarm.limit(self.deadline, asking).await.unwrap_or(Err(Trouble::Deadline))
    }
}
