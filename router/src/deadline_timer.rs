//! A timer for changing deadlines.

use std::{
    future::poll_fn,
    ops::{Deref, DerefMut},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;
use tokio::{
    task::coop::has_budget_remaining,
    time::{Instant, Sleep, sleep_until},
};

/// One timer for all deadlines of a task. Setting a later deadline is free: the timer fires early once and is
/// set again.
#[derive(Debug)]
pub struct DeadlineTimer {
    sleep: Pin<Box<Sleep>>,
    /// The task that the set timer wakes.
    wakes: Option<Waker>,
}

impl DeadlineTimer {
    pub fn new(at: Instant) -> Self {
        Self { sleep: Box::pin(sleep_until(at)), wakes: None }
    }

    /// Ready when `at` has passed.
    pub fn poll(&mut self, at: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let is_set = self.wakes.as_ref().is_some_and(|task| task.will_wake(cx.waker()));
        // The usual case, without the atomic operations of another registration.
        if is_set && at >= self.sleep.deadline() && !self.sleep.is_elapsed() {
            return Poll::Pending;
        }
        loop {
            if at < self.sleep.deadline() {
                self.sleep.as_mut().reset(at);
            }
            // Without budget the sleep only has the task polled again, and registers nothing.
            let registers = has_budget_remaining();
            if self.sleep.as_mut().poll(cx).is_pending() {
                self.wakes = registers.then(|| cx.waker().clone());
                return Poll::Pending;
            }
            self.wakes = None;
            if at <= self.sleep.deadline() {
                return Poll::Ready(());
            }
            self.sleep.as_mut().reset(at);
        }
    }

    /// Returns the output of `future`, or `None` if it is not ready by `at`.
    pub async fn limit<T>(&mut self, at: Instant, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            Poll::Pending => self.poll(at, cx).map(|()| None),
        })
        .await
    }
}

/// The timer that a connection and its requests use one after the other. Setting a new timer to a deadline before all
/// others of its thread costs a system call, which wakes the thread's own timer driver. A used timer is set already, and
/// fires early.
#[derive(Clone, Debug, Default)]
pub struct SharedTimer(Arc<Mutex<Option<DeadlineTimer>>>);

impl SharedTimer {
    /// Takes the timer, or makes one that is set to `at`.
    pub fn take(&self, at: Instant) -> TakenTimer {
        let timer = self.0.lock().take().unwrap_or_else(|| DeadlineTimer::new(at));
        TakenTimer { timer: Some(timer), home: self.clone() }
    }

    /// Ready when `at` has passed. Not for a time in which a request has the timer.
    pub fn poll(&self, at: Instant, cx: &mut Context<'_>) -> Poll<()> {
        self.0.lock().get_or_insert_with(|| DeadlineTimer::new(at)).poll(at, cx)
    }

    /// Frees the timer, if no request has it.
    pub fn clear(&self) {
        self.0.lock().take();
    }
}

/// A timer in use. Dropping it gives it back.
#[derive(Debug)]
pub struct TakenTimer {
    /// `None` only while it is dropped.
    timer: Option<DeadlineTimer>,
    home: SharedTimer,
}

const TAKEN: &str = "contract: the timer is there until it is dropped";

impl Deref for TakenTimer {
    type Target = DeadlineTimer;

    fn deref(&self) -> &DeadlineTimer {
        self.timer.as_ref().expect(TAKEN)
    }
}

impl DerefMut for TakenTimer {
    fn deref_mut(&mut self) -> &mut DeadlineTimer {
        self.timer.as_mut().expect(TAKEN)
    }
}

impl Drop for TakenTimer {
    fn drop(&mut self) {
        *self.home.0.lock() = self.timer.take();
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, time::Duration};

    use tokio::task::coop::consume_budget;

    use super::*;

    /// The paused clock advances to the next timer when all tasks are idle.
    #[tokio::test(start_paused = true)]
    async fn each_deadline_is_kept_whatever_was_set_before() {
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let mut timer = DeadlineTimer::new(after(100));
        for seconds in [20, 5, 30, 100, 200, 40] {
            let already = begun.elapsed();
            assert_eq!(timer.limit(after(seconds), pending::<()>()).await, None);
            assert_eq!(begun.elapsed(), already.max(Duration::from_secs(seconds)));
        }
        assert_eq!(timer.limit(after(300), async { 1 }).await, Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn deadline_is_kept_if_the_task_had_no_budget_to_set_it() {
        let (begun, second) = (Instant::now(), Duration::from_secs(1));
        let mut timer = DeadlineTimer::new(begun + second);
        let mut polls = 0;
        let exhausted = poll_fn(|cx| {
            polls += 1;
            while polls == 1 && has_budget_remaining() {
                let _one_less = pin!(consume_budget()).poll(cx);
            }
            Poll::<()>::Pending
        });
        // A timer that is lost lets the outer one end the wait.
        let kept = tokio::time::timeout(10 * second, timer.limit(begun + second, exhausted));
        assert_eq!((kept.await, begun.elapsed()), (Ok(None), second));
    }

    #[tokio::test(start_paused = true)]
    async fn used_timer_keeps_the_deadlines_of_the_next_request() {
        let (shared, begun) = (SharedTimer::default(), Instant::now());
        let after = |seconds| begun + Duration::from_secs(seconds);
        // The second request takes the timer while it is set to the deadline of the first one.
        let mut first = shared.take(after(100));
        let answered = async {
            tokio::task::yield_now().await;
            1
        };
        assert_eq!(first.limit(after(5), answered).await, Some(1));
        drop(first);
        for seconds in [20, 12, 30] {
            let already = begun.elapsed();
            let late = shared.take(after(100)).limit(after(seconds), pending::<()>()).await;
            assert_eq!(late, None);
            assert_eq!(begun.elapsed(), already.max(Duration::from_secs(seconds)));
        }
    }
}
