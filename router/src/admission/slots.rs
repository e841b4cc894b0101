//! `--max-concurrent-requests`: a limit on the requests that are on the workers at the same time.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::{sync::oneshot, time::Instant};

use super::{
    Client,
    line::{Line, Position},
};
use crate::deadline_timer::DeadlineTimer;

/// A semaphore. Waiting requests form a line in the order of `--queue-policy`.
#[derive(Debug)]
pub(super) struct Slots(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Free slots. 0 while requests wait: a released slot goes to the first of them.
    free: usize,
    line: Line<Permit>,
}

impl State {
    /// Takes a free slot. Returns false if there is none.
    fn take_free(&mut self) -> bool {
        let left = self.free.checked_sub(1);
        self.free = left.unwrap_or(0);
        left.is_some()
    }
}

impl Slots {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { free: limit, line: Line::default() })))
    }

    /// Takes a free slot. Returns `None` if there is none.
    pub(super) fn try_take(self: &Arc<Self>) -> Option<Permit> {
        self.0.lock().take_free().then(|| Permit(Arc::clone(self)))
    }

    /// Takes a slot, or waits for one until `at`.
    pub(super) async fn take(
        self: &Arc<Self>,
        client: Option<Client>,
        timer: &mut DeadlineTimer,
        at: Instant,
    ) -> Option<Permit> {
        let (call, called) = oneshot::channel();
        let position = {
            let mut state = self.0.lock();
            if state.take_free() {
                return Some(Permit(Arc::clone(self)));
            }
            let position = state.line.end(client);
            state.line.insert(position, Some(call));
            position
        };
        let _guard = LineGuard { slots: self, position };
        timer.limit(at, called).await?.ok()
    }

    fn release(self: &Arc<Self>) {
        let first = {
            let mut state = self.0.lock();
            let first = state.line.pop();
            state.free += usize::from(first.is_none());
            first
        };
        if let Some(first) = first {
            // If the request is about to leave, sending fails, and the dropped permit gives the slot to the next one.
            let _taken = first.send(Permit(Arc::clone(self)));
        }
    }
}

/// A slot. Dropping it releases the slot.
#[derive(Debug)]
pub(super) struct Permit(Arc<Slots>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.release();
    }
}

struct LineGuard<'a> {
    slots: &'a Slots,
    position: Position,
}

impl Drop for LineGuard<'_> {
    fn drop(&mut self) {
        self.slots.0.lock().line.remove(self.position);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::task::JoinHandle;

    use super::*;

    fn in_an_hour() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    impl Slots {
        fn waiting(&self) -> usize {
            self.0.lock().line.len()
        }
    }

    /// Starts one request for each of `clients`, one after the other. Each keeps its slot for a moment and appends its
    /// number to the order.
    async fn come(
        slots: &Arc<Slots>,
        clients: &[Option<Client>],
        order: &Arc<Mutex<Vec<usize>>>,
    ) -> Vec<JoinHandle<()>> {
        let mut waiting = Vec::new();
        for (number, &client) in clients.iter().enumerate() {
            let (slots_of_task, order) = (Arc::clone(slots), Arc::clone(order));
            waiting.push(tokio::spawn(async move {
                let mut timer = DeadlineTimer::new(in_an_hour());
                let permit = slots_of_task.take(client, &mut timer, in_an_hour()).await;
                assert!(permit.is_some());
                order.lock().push(number);
                tokio::task::yield_now().await;
            }));
            while slots.waiting() <= number {
                tokio::task::yield_now().await;
            }
        }
        waiting
    }

    #[tokio::test(start_paused = true)]
    async fn slots_go_out_in_order_and_come_back_when_a_waiter_leaves() {
        let slots = Slots::new(1);
        let first = slots.try_take().expect("free");
        assert!(slots.try_take().is_none());
        let order = Arc::default();
        let mut waiting = come(&slots, &[None; 3], &order).await;
        waiting[0].abort();
        while slots.waiting() > 2 {
            tokio::task::yield_now().await;
        }
        drop(first);
        for waiting in waiting.drain(1..) {
            waiting.await.expect("no panic");
        }
        assert_eq!((&order.lock()[..], slots.waiting()), (&[1, 2][..], 0));
        assert!(slots.try_take().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn clients_take_turns() {
        let slots = Slots::new(1);
        let first = slots.try_take();
        let [a, b] = [1, 2].map(|hash| Some(Client::from(hash)));
        let order = Arc::default();
        let waiting = come(&slots, &[a, a, a, b, b], &order).await;
        drop(first);
        for waiting in waiting {
            waiting.await.expect("no panic");
        }
        assert_eq!(&order.lock()[..], [0, 3, 1, 4, 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slot_on_its_way_to_a_request_that_leaves_is_not_lost() {
        let slots = Slots::new(1);
        let first = slots.try_take();
        let mut timer = DeadlineTimer::new(in_an_hour());
        let mut waiting = Box::pin(slots.take(None, &mut timer, in_an_hour()));
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("there is no slot"),
            () = tokio::task::yield_now() => {}
        }
        drop(first);
        drop(waiting); // before it has looked
        assert!(slots.try_take().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_has_an_end() {
        let slots = Slots::new(0);
        let mut timer = DeadlineTimer::new(in_an_hour());
        let soon = Instant::now() + Duration::from_secs(1);
        assert!(slots.take(None, &mut timer, soon).await.is_none());
        assert_eq!(slots.waiting(), 0);
    }
}
