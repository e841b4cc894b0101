//! Where requests wait until a worker can take them: bounded in number and in time, first come,
//! first served.
//!
//! There are two reasons to wait here. `--max-concurrent-requests` is reached: then the next free
//! slot goes to who waits longest. Or every worker has answered that it is busy: then requests stand
//! in line, and the first in it tries again whenever a request has ended, or after a little pause,
//! for others may use these workers, too. Requests that come while there is a line go to its end, streams
//! that broke to its front. Each model has a line of its own: its workers may be busy while those of
//! another model are idle.

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

use super::{
    outflow::{Outflow, seconds},
    window::Window,
};
use crate::{
    alarm::Alarm,
    config::Config,
    error::Error,
    metrics::{Metrics, QueueEnd},
    names::ModelName,
};

/// Pause of the first in line when nothing happens.
const PAUSE: Duration = Duration::from_millis(100);

/// Numbers of requests that come are above this one.
const NEW: u64 = 1 << 63;

/// Requests that wait for the same workers: those for one model that is known to be served, or all others.
pub type Lane = Option<ModelName>;

#[derive(Debug)]
pub struct Queue {
    size: usize,
    /// --queue-timeout-secs.
    longest_wait: Duration,
    metrics: Arc<Metrics>,
    /// One permit per request that may wait.
    places: Semaphore,
    /// One permit per request that may be on the workers; none if there is no limit.
    slots: Option<Arc<Semaphore>>,
    lines: Mutex<Lines>,
    /// Requests in all lines, for a look without the lock.
    in_line: AtomicUsize,
    /// Requests that have ended.
    ended: Window,
    outflow: Outflow,
}

#[derive(Debug, Default)]
struct Lines {
    /// Requests so far. Numbers are by the order of coming, from [`NEW`] on.
    next: u64,
    /// Those that continue a stream so far: they have the numbers below.
    continued: u64,
    /// Those that are not empty. There are few models, so a search is cheap.
    lanes: Vec<(Lane, Line)>,
}

/// By number the way to call the request; none while that request is trying.
type Line = BTreeMap<u64, Option<oneshot::Sender<()>>>;

impl Lines {
    fn of(&mut self, lane: Lane) -> &mut Line {
        let at = self.lanes.iter().position(|(of, _)| *of == lane).unwrap_or_else(|| {
            self.lanes.push((lane, Line::new()));
            self.lanes.len() - 1
        });
        &mut self.lanes[at].1
    }

    fn remove(&mut self, lane: Lane, number: u64) {
        self.of(lane).remove(&number);
        self.lanes.retain(|(_, line)| !line.is_empty());
    }

    fn len(&self) -> usize {
        self.lanes.iter().map(|(_, line)| line.len()).sum()
    }
}

impl Queue {
    pub(crate) fn new(config: &Config, metrics: Arc<Metrics>) -> Self {
        let limit = config.max_concurrent_requests.get();
        let size = config.queue_size.min(Semaphore::MAX_PERMITS);
        Self {
            size,
            longest_wait: config.queue_timeout_secs.get(),
            metrics,
            places: Semaphore::new(size),
            slots: limit.map(|limit| Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS)))),
            lines: Mutex::default(),
            in_line: AtomicUsize::new(0),
            ended: Window::new(Instant::now()),
            outflow: Outflow::new(Instant::now()),
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

    /// Returns false with --queue-size 0: no request may wait.
    pub(crate) fn is_on(&self) -> bool {
        self.size > 0
    }

    /// A place for one more request. Refuses with QueueFull, or with QueueSlow if the expected wait is longer than
    /// --queue-timeout-secs.
    pub(crate) fn place(&self) -> Result<Place<'_>, Error> {
        let Ok(permit) = self.places.try_acquire() else {
            self.metrics.queue.ends.increment(QueueEnd::Full);
            return Err(Error::QueueFull { limit: self.size, retry_after: self.advice() });
        };
        let now = Instant::now();
        if self.waiting() == 1 {
            self.outflow.begin(now);
        }
        let wait = self.outflow.expected_wait(self.waiting(), now);
        if let Some(wait) = wait.filter(|wait| *wait > self.longest_wait) {
            self.metrics.queue.ends.increment(QueueEnd::Slow);
            let retry_after = seconds(wait.saturating_sub(self.longest_wait));
            return Err(Error::QueueSlow { wait, limit: self.longest_wait, retry_after });
        }
        Ok(Place { queue: self, since: now, _permit: Some(permit) })
    }

    /// Seconds until the requests that wait now will have had their turn, at the rate at which requests
    /// have left the queue for a worker since it was last empty.
    pub(crate) fn advice(&self) -> u64 {
        self.outflow.advice(self.waiting(), Instant::now())
    }

    /// A place for a request that was accepted before. Such a request is never refused.
    pub(crate) fn place_again(&self) -> Place<'_> {
        Place { queue: self, since: Instant::now(), _permit: self.places.try_acquire().ok() }
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

    /// Whether requests wait in that line. It is asked for only if there is any line.
    pub(crate) fn has_line(&self, lane: impl FnOnce() -> Lane) -> bool {
        if self.in_line.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let lane = lane();
        self.lines.lock().lanes.iter().any(|(of, _)| *of == lane)
    }

    /// A place at the end of the line.
    pub(crate) fn line_up(&self, lane: Lane) -> Result<Ticket<'_>, Error> {
        let place = self.place()?;
        let mut lines = self.lines.lock();
        lines.next += 1;
        let number = NEW + lines.next;
        Ok(self.stand(place, lane, number, &mut lines))
    }

    /// A place before all requests that have no answer yet, for one whose stream has broken. It is never refused:
    /// its client has a part of the answer.
    pub(crate) fn step_in(&self, lane: Lane) -> Ticket<'_> {
        let number = {
            let mut lines = self.lines.lock();
            lines.continued += 1;
            lines.continued
        };
        self.return_to(lane, number)
    }

    /// The place that a request had before a worker seemed to take it. It is never refused: requests
    /// that came later are in the queue.
    pub(crate) fn return_to(&self, lane: Lane, number: u64) -> Ticket<'_> {
        self.stand(self.place_again(), lane, number, &mut self.lines.lock())
    }

    fn stand<'a>(
        &'a self,
        place: Place<'a>,
        lane: Lane,
        number: u64,
        lines: &mut Lines,
    ) -> Ticket<'a> {
        lines.of(lane).insert(number, None);
        self.in_line.store(lines.len(), Ordering::Relaxed);
        Ticket { place, standing: Standing { queue: self, lane, number } }
    }

    /// There may be room on a worker: the first in each line that is not trying already tries.
    fn call_next(&self) {
        if self.in_line.load(Ordering::Relaxed) == 0 {
            return;
        }
        for (_, line) in &mut self.lines.lock().lanes {
            let mut calls = line.values_mut().filter_map(Option::take);
            // A request that is just leaving does not listen.
            let _called = calls.any(|call| call.send(()).is_ok());
        }
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
    _permit: Option<SemaphorePermit<'a>>,
}

impl Place<'_> {
    pub(crate) fn served(self) {
        self.queue.outflow.add(Instant::now());
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
    lane: Lane,
    number: u64,
}

impl Ticket<'_> {
    pub(crate) fn number(&self) -> u64 {
        self.standing.number
    }

    pub(crate) fn served(self) {
        self.place.served();
    }

    pub(crate) fn give_up(self) {
        self.place.give_up();
    }

    /// Waits until it is this one's turn to try; false if it was not by `at`.
    pub(crate) async fn turn(&self, alarm: &mut Alarm, at: Instant) -> bool {
        let Standing { queue, lane, number } = &self.standing;
        let (call, mut called) = oneshot::channel();
        queue.lines.lock().of(*lane).insert(*number, Some(call));
        loop {
            let now = Instant::now();
            if now >= at {
                return false;
            }
            let pause = PAUSE.mul_f64(0.5 + fastrand::f64());
            if alarm.limit(at.min(now + pause), &mut called).await.is_some() {
                return true;
            }
            let is_first = |(first, _): (&u64, _)| first == number;
            if queue.lines.lock().of(*lane).first_key_value().is_some_and(is_first) {
                return Instant::now() < at;
            }
        }
    }
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        let mut lines = self.queue.lines.lock();
        lines.remove(self.lane, self.number);
        self.queue.in_line.store(lines.len(), Ordering::Relaxed);
        drop(lines);
        // Either it was taken, and there may be room for more; or it has given up its turn.
        self.queue.call_next();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::{super::window::SECONDS, *};

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
        let (first, second) =
            (queue.line_up(None).expect("room"), queue.line_up(None).expect("room"));
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
        assert!(!queue.has_line(|| None));
        assert_eq!(queue.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn lines_do_not_block_each_other_and_a_return_is_to_the_same_place() {
        let queue = queue(&Config { queue_size: 3, ..Config::default() });
        let other = Some(ModelName::new("other"));
        let first = queue.line_up(None).expect("room");
        assert!(queue.has_line(|| None) && !queue.has_line(|| other));
        let number = first.number();
        let second = queue.line_up(None).expect("room");
        first.served();
        // Others have taken its room meanwhile.
        let more = [other, None].map(|lane| queue.line_up(lane).expect("room"));
        assert!(queue.line_up(None).is_err());
        let first = queue.return_to(None, number);
        let mut alarms = [Alarm::new(in_an_hour()), Alarm::new(in_an_hour())];
        let [one, two] = &mut alarms;
        tokio::select! {
            biased;
            _ = second.turn(two, in_an_hour()) => panic!("overtaken"),
            mine = first.turn(one, in_an_hour()) => assert!(mine),
        }
        drop((first, second, more));
        assert_eq!((queue.waiting(), queue.has_line(|| other)), (0, false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_broken_stream_goes_before_all_that_wait_and_is_never_refused() {
        let queue = queue(&Config { queue_size: 1, ..Config::default() });
        let waits = queue.line_up(None).expect("room");
        let (first, second) = (queue.step_in(None), queue.step_in(None));
        assert!(first.number() < second.number() && second.number() < waits.number());
        let mut alarms = [Alarm::new(in_an_hour()), Alarm::new(in_an_hour())];
        let [one, two] = &mut alarms;
        tokio::select! {
            biased;
            _ = waits.turn(one, in_an_hour()) => panic!("overtaken"),
            mine = first.turn(two, in_an_hour()) => assert!(mine),
        }
        drop((first, second));
        assert!(waits.turn(one, in_an_hour()).await);
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_refused_is_told_when_it_is_worth_trying_again() {
        let queue = queue(&Config { queue_size: 40, ..Config::default() });
        let places: Vec<_> = (0..40).map(|_| queue.place().expect("room")).collect();
        let refused = |queue: &Queue| match queue.place().map(drop) {
            Err(Error::QueueFull { limit: 40, retry_after }) => retry_after,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&queue), 40, "nothing has left the queue yet");
        let mut places = places.into_iter();
        for place in places.by_ref().take(10) {
            place.served();
        }
        let _more: Vec<_> = (0..10).map(|_| queue.place().expect("room")).collect();
        assert_eq!(refused(&queue), 4, "40 wait, 10 a second leave");
        // What is refused ends, too, but leaves no room.
        for _ in 0..1000 {
            drop(slot(&queue).await);
        }
        assert_eq!(refused(&queue), 4);
    }

    /// Ten requests leave in ten seconds, and the longest wait is six seconds: six requests may wait.
    #[tokio::test(start_paused = true)]
    async fn a_request_that_would_wait_too_long_is_refused_at_once() {
        let six = 6.0.try_into().expect("a time");
        let config = Config { queue_timeout_secs: six, queue_size: 40, ..Config::default() };
        let queue = queue(&config);
        let mut places: VecDeque<_> = (0..5).map(|_| queue.place().expect("room")).collect();
        for _ in 0..SECONDS {
            places.push_back(queue.place().expect("too early to tell"));
            tokio::time::advance(Duration::from_secs(1)).await;
            places.pop_front().expect("the first").served();
        }
        places.push_back(queue.place().expect("the sixth"));
        match queue.place().map(drop) {
            Err(Error::QueueSlow { wait, retry_after, .. }) => {
                assert_eq!((wait, retry_after), (Duration::from_secs(7), 1));
            }
            other => panic!("{other:?}"),
        }
        places.clear();
        places.extend((0..40).map(|_| queue.place().expect("the queue was empty")));
    }
}
