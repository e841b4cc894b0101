//! Where requests wait until a worker can take them: bounded in number and in time, first come,
//! first served.
//!
//! There are two reasons to wait here. `--max-concurrent-requests` is reached: then the next free
//! slot goes to who waits longest. Or every worker has answered that it is busy: then requests stand
//! in line, and the first in it tries again whenever a request has ended, or after a little pause,
//! for others may use these workers, too. Whoever comes while there is a line goes to its end.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, oneshot},
    time::Instant,
};

use super::window::Window;
use crate::{
    alarm::Alarm,
    config::Config,
    error::Error,
    metrics::{Metrics, QueueEnd},
};

/// Pause of the first in line when nothing happens.
const PAUSE: Duration = Duration::from_millis(100);

/// Advice longer than this is not about the present any more.
const LONGEST_ADVICE: u64 = 60;

#[derive(Debug)]
pub struct Queue {
    size: usize,
    metrics: Arc<Metrics>,
    /// One permit per request that may wait.
    places: Semaphore,
    /// One permit per request that may be on the workers; none if there is no limit.
    slots: Option<Arc<Semaphore>>,
    line: Mutex<Line>,
    /// How long the line is, for those who only want to know whether there is one.
    in_line: AtomicUsize,
    /// Requests that have ended.
    ended: Window,
}

/// By the order of coming.
#[derive(Debug, Default)]
struct Line {
    next: u64,
    /// Whom to call; nobody while that request is trying.
    tickets: BTreeMap<u64, Option<oneshot::Sender<()>>>,
}

impl Queue {
    pub(crate) fn new(config: &Config, metrics: Arc<Metrics>) -> Self {
        let limit = config.max_concurrent_requests.get();
        let size = config.queue_size.min(Semaphore::MAX_PERMITS);
        Self {
            size,
            metrics,
            places: Semaphore::new(size),
            slots: limit.map(|limit| Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS)))),
            line: Mutex::default(),
            in_line: AtomicUsize::new(0),
            ended: Window::new(Instant::now()),
        }
    }

    /// Requests that wait, for whatever reason.
    pub fn waiting(&self) -> usize {
        self.size - self.places.available_permits()
    }

    /// Requests that ended in the last ten seconds.
    pub(crate) fn ended(&self, now: Instant) -> u64 {
        self.ended.sum(now)
    }

    /// One more request waits, if there is room for it.
    pub(crate) fn place(&self) -> Result<Place<'_>, Error> {
        let Ok(permit) = self.places.try_acquire() else {
            self.metrics.queue.ends.increment(QueueEnd::Full);
            return Err(Error::QueueFull { limit: self.size, retry_after: self.advice() });
        };
        Ok(Place { queue: self, since: Instant::now(), _permit: permit })
    }

    /// Seconds until those that wait now will have had their turn, at the rate at which requests end.
    pub(crate) fn advice(&self) -> u64 {
        let now = Instant::now();
        let seconds = self.ended.span(now).as_secs().max(1);
        (self.waiting() as u64 * seconds).div_ceil(self.ended(now).max(1)).clamp(1, LONGEST_ADVICE)
    }

    /// A slot, if there is a free one and nobody waits for it.
    pub(crate) fn try_enter(self: &Arc<Self>) -> Option<Slot> {
        let permit = match &self.slots {
            None => None,
            Some(slots) => Some(Arc::clone(slots).try_acquire_owned().ok()?),
        };
        Some(Slot { queue: Arc::clone(self), _permit: permit })
    }

    /// Waits for a slot; `None` if there was none by `at`.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        alarm: &mut Alarm,
        at: Instant,
    ) -> Result<Option<Slot>, Error> {
        let Some(slots) = &self.slots else {
            return Ok(self.try_enter());
        };
        let place = self.place()?;
        let Some(permit) = alarm.limit(at, Arc::clone(slots).acquire_owned()).await else {
            place.give_up();
            return Ok(None);
        };
        place.served();
        // It is never closed, so an error cannot be.
        Ok(Some(Slot { queue: Arc::clone(self), _permit: permit.ok() }))
    }

    pub(crate) fn has_line(&self) -> bool {
        self.in_line.load(Ordering::Relaxed) > 0
    }

    /// A place at the end of the line.
    pub(crate) fn line_up(&self) -> Result<Ticket<'_>, Error> {
        let place = self.place()?;
        let mut line = self.line.lock();
        line.next += 1;
        let number = line.next;
        line.tickets.insert(number, None);
        self.in_line.store(line.tickets.len(), Ordering::Relaxed);
        Ok(Ticket { place, standing: Standing { queue: self, number } })
    }

    /// There may be room on a worker.
    fn call_next(&self) {
        if !self.has_line() {
            return;
        }
        let mut line = self.line.lock();
        let mut calls = line.tickets.values_mut().filter_map(Option::take);
        // Whoever is just leaving does not listen.
        let _called = calls.any(|call| call.send(()).is_ok());
    }
}

/// A request that is, or soon will be, on a worker.
#[derive(Debug)]
pub struct Slot {
    queue: Arc<Queue>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.queue.ended.add(Instant::now());
        self.queue.call_next();
    }
}

/// A request that waits. Dropping it is leaving without a word, as clients do.
pub(crate) struct Place<'a> {
    queue: &'a Queue,
    since: Instant,
    _permit: SemaphorePermit<'a>,
}

impl Place<'_> {
    pub(crate) fn served(self) {
        self.end(QueueEnd::Served);
    }

    pub(crate) fn give_up(self) {
        self.end(QueueEnd::Timeout);
    }

    fn end(self, end: QueueEnd) {
        let metrics = &self.queue.metrics.queue;
        metrics.wait.observe(self.since.elapsed());
        metrics.ends.increment(end);
    }
}

/// A place in the line, kept while its request tries again. Dropping it gives it up.
pub(crate) struct Ticket<'a> {
    place: Place<'a>,
    standing: Standing<'a>,
}

struct Standing<'a> {
    queue: &'a Queue,
    number: u64,
}

impl Ticket<'_> {
    pub(crate) fn served(self) {
        self.place.served();
    }

    pub(crate) fn give_up(self) {
        self.place.give_up();
    }

    /// Waits until it is this one's turn to try; false if it was not by `at`.
    pub(crate) async fn turn(&self, alarm: &mut Alarm, at: Instant) -> bool {
        let Standing { queue, number } = &self.standing;
        let (call, mut called) = oneshot::channel();
        queue.line.lock().tickets.insert(*number, Some(call));
        loop {
            let now = Instant::now();
            if now >= at {
                return false;
            }
            let pause = PAUSE.mul_f64(0.5 + fastrand::f64());
            if alarm.limit(at.min(now + pause), &mut called).await.is_some() {
                return true;
            }
            let line = queue.line.lock();
            if line.tickets.first_key_value().is_some_and(|(first, _)| first == number) {
                return Instant::now() < at;
            }
        }
    }
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        let mut line = self.queue.line.lock();
        line.tickets.remove(&self.number);
        self.queue.in_line.store(line.tickets.len(), Ordering::Relaxed);
        drop(line);
        // Either it was taken, and there may be room for more; or it has given up its turn.
        self.queue.call_next();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(config: &Config) -> Arc<Queue> {
        Arc::new(Queue::new(config, Arc::default()))
    }

    fn in_an_hour() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    async fn slot(queue: &Arc<Queue>) -> Slot {
        let mut alarm = Alarm::new(in_an_hour());
        queue.enter(&mut alarm, in_an_hour()).await.expect("room").expect("in time")
    }

    #[tokio::test(start_paused = true)]
    async fn slots_go_out_in_order_and_come_back_when_a_waiter_leaves() {
        let queue = queue(&Config {
            max_concurrent_requests: 1.try_into().expect("a number"),
            ..Config::default()
        });
        let first = slot(&queue).await;
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut waiting = Vec::new();
        for number in 0..3 {
            let (behind, order) = (Arc::clone(&queue), Arc::clone(&order));
            waiting.push(tokio::spawn(async move {
                let _slot = slot(&behind).await;
                order.lock().push(number);
            }));
            while queue.waiting() <= number {
                tokio::task::yield_now().await;
            }
        }
        waiting[0].abort();
        while queue.waiting() > 2 {
            tokio::task::yield_now().await;
        }
        drop(first);
        for waiting in waiting.drain(1..) {
            waiting.await.expect("no panic");
        }
        assert_eq!((&order.lock()[..], queue.waiting()), (&[1, 2][..], 0));
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_calls_the_first_in_line_which_keeps_its_place_until_it_is_taken() {
        let queue = queue(&Config::default());
        let ended = slot(&queue).await;
        let (first, second) = (queue.line_up().expect("room"), queue.line_up().expect("room"));
        let mut alarms = [Alarm::new(in_an_hour()), Alarm::new(in_an_hour())];
        let [one, two] = &mut alarms;
        drop(ended);
        // Nothing else happens: the first tries every now and then, the second never gets a turn.
        tokio::select! {
            biased;
            _ = second.turn(two, in_an_hour()) => panic!("overtaken"),
            () = async { for _ in 0..5 { assert!(first.turn(one, in_an_hour()).await); } } => {}
        }
        drop(first);
        assert!(second.turn(two, in_an_hour()).await);
        drop(second);
        assert!(!queue.has_line());
        assert_eq!(queue.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_refused_is_told_when_it_is_worth_trying_again() {
        let queue = queue(&Config { queue_size: 40, ..Config::default() });
        let places: Vec<_> = (0..40).map(|_| queue.place().expect("room")).collect();
        let refused = |queue: &Queue| match queue.place().map(drop) {
            Err(Error::QueueFull { limit: 40, retry_after }) => retry_after,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&queue), 40, "nothing has ended yet");
        for _ in 0..10 {
            drop(slot(&queue).await);
        }
        assert_eq!(refused(&queue), 4, "40 wait, 10 a second end");
        drop(places);
        assert_eq!(queue.advice(), 1);
    }
}
