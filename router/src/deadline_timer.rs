//! A timer for changing deadlines.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
};

use tokio::time::{Instant, Sleep, sleep_until};

/// One timer for all deadlines of a request. Setting a later deadline is free: the timer fires early once and is
/// set again.
pub struct DeadlineTimer(Pin<Box<Sleep>>);

impl DeadlineTimer {
    pub fn new(at: Instant) -> Self {
        Self(Box::pin(sleep_until(at)))
    }

    /// Ready when `at` has passed.
    pub fn poll(&mut self, at: Instant, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if at < self.0.deadline() {
                self.0.as_mut().reset(at);
            }
            ready!(self.0.as_mut().poll(cx));
            if at <= self.0.deadline() {
                return Poll::Ready(());
            }
            self.0.as_mut().reset(at);
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

#[cfg(test)]
mod tests {
    use std::{future::pending, time::Duration};

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
}
