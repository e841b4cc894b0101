//! The gate of the data plane: counts requests in flight, and refuses new ones during shutdown.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use tokio::{sync::Notify, time::timeout};

use crate::cores::PerCore;

/// Counts the data-plane requests in flight.
#[derive(Debug)]
pub struct Gate {
    entries: PerCore<Arc<Entries>>,
    state: Arc<State>,
}

/// The requests in flight that have entered on one thread. The counter and the reference count of its `Arc` have cache
/// lines of their own, because threads that write the same line wait for each other.
#[derive(Debug)]
#[repr(align(64))]
struct Entries {
    in_flight: AtomicUsize,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    draining: AtomicBool,
    cut: AtomicBool,
    emptied: Notify,
}

/// The entry of one request. Dropping it ends the request.
#[derive(Debug)]
pub struct InFlight(Arc<Entries>);

impl Default for Gate {
    fn default() -> Self {
        let state = Arc::<State>::default();
        let entries = || Entries { in_flight: AtomicUsize::new(0), state: Arc::clone(&state) };
        Self { entries: PerCore::new(|| Arc::new(entries())), state }
    }
}

impl Gate {
    /// Enters a request. `None` once draining has started.
    pub fn enter(&self) -> Option<InFlight> {
        let entries = self.entries.own();
        // Counted first and checked after: a drain that starts in between waits for this request.
        entries.in_flight.fetch_add(1, Ordering::SeqCst);
        let pass = InFlight(Arc::clone(entries));
        (!self.is_draining()).then_some(pass)
    }

    pub fn in_flight(&self) -> usize {
        self.entries.iter().map(|entries| entries.in_flight.load(Ordering::SeqCst)).sum()
    }

    pub fn is_draining(&self) -> bool {
        self.state.draining.load(Ordering::SeqCst)
    }

    /// Refuses new requests.
    pub fn close(&self) {
        self.state.draining.store(true, Ordering::SeqCst);
    }

    /// Ends all requests: streams with an error event, requests without a response with 503.
    pub fn cut(&self) {
        self.state.cut.store(true, Ordering::Release);
    }

    pub fn is_cut(&self) -> bool {
        self.state.cut.load(Ordering::Acquire)
    }

    /// Returns the output of `answering`, or `None` after the cut. The caller must poll it again after the cut;
    /// connections do so when their lifecycle changes.
    pub async fn until_cut<T>(
        &self,
        mut answering: Pin<Box<impl Future<Output = T> + ?Sized>>,
    ) -> Option<T> {
        poll_fn(|cx| match answering.as_mut().poll(cx) {
            Poll::Pending if self.is_cut() => Poll::Ready(None),
            polled => polled.map(Some),
        })
        .await
    }

    /// Refuses new requests and waits for the ones in flight. Returns whether all have ended within `grace`.
    pub async fn drain(&self, grace: Duration) -> bool {
        self.close();
        let emptied = async {
            loop {
                // Made before the test: from now on it is woken, also by a notification before its first poll.
                let emptied = self.state.emptied.notified();
                if self.in_flight() == 0 {
                    return;
                }
                emptied.await;
            }
        };
        timeout(grace, emptied).await.is_ok()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let Entries { in_flight, state } = &*self.0;
        let is_last = in_flight.fetch_sub(1, Ordering::SeqCst) == 1;
        if is_last && state.draining.load(Ordering::SeqCst) {
            state.emptied.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cores::Cores;

    #[tokio::test]
    async fn draining_waits_for_the_last_request_and_admits_none() {
        let gate = Arc::new(Gate::default());
        let first = gate.enter().expect("open");
        assert!(!gate.drain(Duration::from_millis(1)).await);
        assert!(gate.enter().is_none());
        assert_eq!(gate.in_flight(), 1);
        let waiting = tokio::spawn({
            let gate = Arc::clone(&gate);
            async move { gate.drain(Duration::from_secs(60)).await }
        });
        drop(first);
        assert!(waiting.await.expect("no panic"));
        assert_eq!(gate.in_flight(), 0);
    }

    #[tokio::test]
    async fn requests_of_all_threads_count() {
        let (gate, cores) = (Arc::new(Gate::default()), Cores::start().expect("threads"));
        let own = gate.enter();
        let entering = Arc::clone(&gate);
        let other = cores.next().spawn(async move { entering.enter() }).await.expect("no panic");
        assert_eq!(gate.in_flight(), 2);
        drop((own, other));
        assert_eq!(gate.in_flight(), 0);
    }
}
