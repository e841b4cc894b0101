//! The queue of requests that no worker can take now. It is bounded in number and in time.
//!
//! A request waits for one of two reasons:
//!
//! * As many requests as `--max-concurrent-requests` allows are on the workers ([`Slots`]).
//! * Every worker has answered that it is busy. Then requests wait in a line ([`Lines`]). The first one tries again
//!   whenever a request has ended, and after a short pause: other routers may use the same workers. While there is a
//!   line, new requests join it, and broken streams go to its front. Each model has its own line, because its workers
//!   may be busy while those of another model are idle.
//!
//! `--queue-policy` orders all lines.

use std::{net::IpAddr, sync::Arc, time::Duration};

use http::HeaderMap;
use tokio::{
    sync::{Semaphore, SemaphorePermit, watch},
    time::Instant,
};

use super::{
    Client,
    client::Clients,
    line::Position,
    lines::{LineGuard, LineKey, Lines},
    outflow::{Outflow, seconds},
    shares::Shares,
    slots::{Permit, Slots},
    window::Window,
};
use crate::{
    config::Config,
    deadline_timer::DeadlineTimer,
    error::Error,
    metrics::{Metrics, QueueEnd},
};

/// The queue of requests that wait for a worker.
#[derive(Debug)]
pub struct Queue {
    size: usize,
    /// --queue-timeout-secs.
    longest_wait: Duration,
    metrics: Arc<Metrics>,
    /// `None` under `--queue-policy fcfs`.
    clients: Option<Clients>,
    shares: Shares,
    /// One permit for each request that may wait.
    places: Semaphore,
    /// `None` without --max-concurrent-requests.
    slots: Option<Arc<Slots>>,
    lines: Lines,
    /// Requests that have ended.
    ended: Window,
    outflow: Outflow,
    /// Changes when the operator aborts all requests.
    aborts: watch::Sender<()>,
}

impl Queue {
    pub(crate) fn new(config: &Config, metrics: Arc<Metrics>) -> Self {
        let limit = config.max_concurrent_requests.get();
        let size = config.queue_size.min(Semaphore::MAX_PERMITS);
        Self {
            size,
            longest_wait: config.queue_timeout_secs.get(),
            metrics,
            clients: Clients::new(config),
            shares: Shares::default(),
            places: Semaphore::new(size),
            slots: limit.map(Slots::new),
            lines: Lines::default(),
            ended: Window::new(Instant::now()),
            outflow: Outflow::new(Instant::now()),
            aborts: watch::Sender::new(()),
        }
    }

    /// Number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.size - self.places.available_permits()
    }

    /// Ends the wait of all requests, which fail with Aborted.
    pub(crate) fn abort_all(&self) {
        self.aborts.send_replace(());
    }

    /// Returns a receiver that changes when all requests are aborted from now on.
    pub(crate) fn aborts(&self) -> watch::Receiver<()> {
        self.aborts.subscribe()
    }

    /// Requests that ended in the last ten seconds.
    pub(crate) fn ended(&self, now: Instant) -> u64 {
        self.ended.sum(now)
    }

    /// Returns false with --queue-size 0: no request may wait.
    pub(crate) fn is_on(&self) -> bool {
        self.size > 0
    }

    /// The client of a request with these headers; `None` if clients do not take turns.
    pub(crate) fn client(&self, headers: &HeaderMap, address: IpAddr) -> Option<Client> {
        self.clients.as_ref().map(|clients| clients.of(headers, address))
    }

    /// Takes a place for one more request. Refuses with QueueFull, or with QueueSlow if the expected wait is longer
    /// than --queue-timeout-secs.
    pub(crate) fn place(&self, client: Option<Client>) -> Result<Place<'_>, Error> {
        let now = Instant::now();
        // Before it takes the place: of several requests that come at once, the first one must see the queue empty.
        if self.waiting() == 0 {
            self.outflow.begin(now);
        }
        let permit = self.places.try_acquire().map_err(|_| self.full())?;
        let turns = match client {
            None => self.waiting(),
            Some(client) => {
                // The request has just taken a place, which counts as free here.
                let free = self.places.available_permits() + 1;
                self.shares.try_add(client, free).ok_or_else(|| self.full())?
            }
        };
        let place = Place { queue: self, since: now, client, _permit: Some(permit) };
        let wait = self.outflow.expected_wait(turns, now);
        if let Some(wait) = wait.filter(|wait| *wait > self.longest_wait) {
            self.metrics.queue.ends.increment(QueueEnd::Slow);
            let retry_after = seconds(wait.saturating_sub(self.longest_wait));
            return Err(Error::QueueSlow { wait, limit: self.longest_wait, retry_after });
        }
        Ok(place)
    }

    fn full(&self) -> Error {
        self.metrics.queue.ends.increment(QueueEnd::Full);
        Error::QueueFull { limit: self.size, retry_after: self.retry_after_s() }
    }

    /// Seconds for Retry-After: the expected time until all waiting requests have left the queue.
    pub(crate) fn retry_after_s(&self) -> u64 {
        self.outflow.retry_after_s(self.waiting(), Instant::now())
    }

    /// Takes a place for a request that has been accepted before. Never refuses.
    pub(crate) fn readmit(&self, client: Option<Client>) -> Place<'_> {
        if let Some(client) = client {
            self.shares.add(client);
        }
        let permit = self.places.try_acquire().ok();
        Place { queue: self, since: Instant::now(), client, _permit: permit }
    }

    /// Takes a free slot. Returns `None` if there is none.
    pub(crate) fn try_enter(self: &Arc<Self>) -> Option<Slot> {
        let permit = match &self.slots {
            None => None,
            Some(slots) => Some(slots.try_take()?),
        };
        Some(Slot { queue: Arc::clone(self), _permit: permit })
    }

    /// Waits for a slot until `at`. Returns `None` if none has become free. Refuses like `place`, and with Aborted.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        client: Option<Client>,
        timer: &mut DeadlineTimer,
        at: Instant,
    ) -> Result<Option<Slot>, Error> {
        let Some(slots) = &self.slots else {
            return Ok(self.try_enter());
        };
        let place = self.place(client)?;
        let taking = slots.take(client, timer, at);
        let Some(permit) = place.unless_aborted(&mut self.aborts(), taking).await? else {
            place.expired();
            return Ok(None);
        };
        place.served();
        Ok(Some(Slot { queue: Arc::clone(self), _permit: Some(permit) }))
    }

    /// Whether requests wait in the line. `line_key` is called only if there is a request in any line.
    pub(crate) fn has_line(&self, line_key: impl FnOnce() -> LineKey) -> bool {
        self.lines.has(line_key)
    }

    /// Joins the line: at its end, or after the earlier requests of the client. Refuses like `place`.
    pub(crate) fn join(
        &self,
        line_key: LineKey,
        client: Option<Client>,
    ) -> Result<Ticket<'_>, Error> {
        let place = self.place(client)?;
        Ok(Ticket { place, line_guard: self.lines.join(line_key, client) })
    }

    /// Joins the line with a broken stream, before all requests without a response. Never refuses: the client has a
    /// part of the answer.
    pub(crate) fn join_front(&self, line_key: LineKey, client: Option<Client>) -> Ticket<'_> {
        self.return_to(line_key, self.lines.front(line_key, client))
    }

    /// Returns to the earlier position of the request, after a worker that seemed to accept it has refused it. Never
    /// refuses: later requests are in the queue.
    pub(crate) fn return_to(&self, line_key: LineKey, position: Position) -> Ticket<'_> {
        let place = self.readmit(position.client());
        Ticket { place, line_guard: self.lines.join_at(line_key, position) }
    }
}

/// The ticket of a request that waits in a line. It is kept while the request tries again. Dropping it leaves the line.
pub(crate) struct Ticket<'a> {
    place: Place<'a>,
    line_guard: LineGuard<'a>,
}

impl Ticket<'_> {
    pub(crate) fn position(&self) -> Position {
        self.line_guard.position()
    }

    /// Ends the wait: a worker has taken the request.
    pub(crate) fn served(self) {
        self.place.served();
    }

    /// Ends the wait at its time limit.
    pub(crate) fn expired(self) {
        self.place.expired();
    }

    pub(crate) fn place(&self) -> &Place<'_> {
        &self.place
    }

    /// Waits for the turn of this request. Returns false if it has not come by `at`.
    pub(crate) async fn turn(&self, timer: &mut DeadlineTimer, at: Instant) -> bool {
        self.line_guard.turn(timer, at).await
    }
}

/// The slot of a request on the workers. Dropping it ends the request.
#[derive(Debug)]
pub struct Slot {
    queue: Arc<Queue>,
    _permit: Option<Permit>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.queue.ended.add(Instant::now());
        self.queue.lines.call_next();
    }
}

/// The place of a waiting request. Dropping it leaves the queue, and does not count as a request that a worker took:
/// the client has disconnected.
pub(crate) struct Place<'a> {
    queue: &'a Queue,
    since: Instant,
    client: Option<Client>,
    _permit: Option<SemaphorePermit<'a>>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(client) = self.client {
            self.queue.shares.remove(client);
        }
    }
}

impl Place<'_> {
    pub(crate) fn served(self) {
        self.queue.outflow.add(Instant::now());
        self.end(QueueEnd::Served);
    }

    pub(crate) fn expired(self) {
        self.end(QueueEnd::Timeout);
    }

    /// Awaits `waiting`. Fails with Aborted if the operator aborts all requests before.
    pub(crate) async fn unless_aborted<T>(
        &self,
        aborts: &mut watch::Receiver<()>,
        waiting: impl Future<Output = T>,
    ) -> Result<T, Error> {
        tokio::select! {
            biased;
            _ = aborts.changed() => {
                self.end(QueueEnd::Aborted);
                Err(Error::Aborted)
            }
            outcome = waiting => Ok(outcome),
        }
    }

    fn end(&self, end: QueueEnd) {
        let metrics = &self.queue.metrics.queue;
        metrics.wait.observe(self.since.elapsed());
        metrics.ends.increment(end);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::VecDeque,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use tokio::runtime::Handle;

    use super::{super::window::SECONDS, *};
    use crate::{config::QueuePolicy, names::ModelName};

    fn queue(config: &Config) -> Arc<Queue> {
        Arc::new(Queue::new(config, Arc::default()))
    }

    fn in_an_hour() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    async fn slot(queue: &Arc<Queue>) -> Slot {
        let mut timer = DeadlineTimer::new(in_an_hour());
        queue.enter(None, &mut timer, in_an_hour()).await.expect("room").expect("in time")
    }

    #[tokio::test(start_paused = true)]
    async fn request_end_wakes_the_first_waiter_which_keeps_its_place() {
        let queue = queue(&Config::default());
        let ended = slot(&queue).await;
        let (first, second) =
            (queue.join(None, None).expect("room"), queue.join(None, None).expect("room"));
        let mut timers = [DeadlineTimer::new(in_an_hour()), DeadlineTimer::new(in_an_hour())];
        let [one, two] = &mut timers;
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
        let first = queue.join(None, None).expect("room");
        assert!(queue.has_line(|| None) && !queue.has_line(|| other));
        let position = first.position();
        let second = queue.join(None, None).expect("room");
        first.served();
        // Others have taken its room meanwhile.
        let more = [other, None].map(|line_key| queue.join(line_key, None).expect("room"));
        assert!(queue.join(None, None).is_err());
        let first = queue.return_to(None, position);
        let mut timers = [DeadlineTimer::new(in_an_hour()), DeadlineTimer::new(in_an_hour())];
        let [one, two] = &mut timers;
        tokio::select! {
            biased;
            _ = second.turn(two, in_an_hour()) => panic!("overtaken"),
            mine = first.turn(one, in_an_hour()) => assert!(mine),
        }
        drop((first, second, more));
        assert_eq!((queue.waiting(), queue.has_line(|| other)), (0, false));
    }

    #[tokio::test(start_paused = true)]
    async fn broken_stream_goes_first_and_is_never_refused() {
        let queue = queue(&Config { queue_size: 1, ..Config::default() });
        let waits = queue.join(None, None).expect("room");
        let (first, second) = (queue.join_front(None, None), queue.join_front(None, None));
        assert!(first.position() < second.position() && second.position() < waits.position());
        let mut timers = [DeadlineTimer::new(in_an_hour()), DeadlineTimer::new(in_an_hour())];
        let [one, two] = &mut timers;
        tokio::select! {
            biased;
            _ = waits.turn(one, in_an_hour()) => panic!("overtaken"),
            mine = first.turn(two, in_an_hour()) => assert!(mine),
        }
        drop((first, second));
        assert!(waits.turn(one, in_an_hour()).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_has_the_time_after_which_a_retry_is_worthwhile() {
        let queue = queue(&Config { queue_size: 40, ..Config::default() });
        let places: Vec<_> = (0..40).map(|_| queue.place(None).expect("room")).collect();
        let refused = |queue: &Queue| match queue.place(None).map(drop) {
            Err(Error::QueueFull { limit: 40, retry_after }) => retry_after,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&queue), 40, "nothing has left the queue yet");
        let mut places = places.into_iter();
        for place in places.by_ref().take(10) {
            place.served();
        }
        let _more: Vec<_> = (0..10).map(|_| queue.place(None).expect("room")).collect();
        assert_eq!(refused(&queue), 4, "40 wait, 10 a second leave");
        // Refused requests end as well, but leave no room.
        for _ in 0..1000 {
            drop(slot(&queue).await);
        }
        assert_eq!(refused(&queue), 4);
    }

    #[test]
    fn one_client_does_not_fill_the_queue_for_the_others() {
        let fair = Config { queue_policy: QueuePolicy::Fair, queue_size: 8, ..Config::default() };
        let queue = queue(&fair);
        let [flood, other] = ["10.0.0.1", "10.0.0.2"]
            .map(|address| queue.client(&HeaderMap::new(), address.parse().expect("an address")));
        assert!(flood.is_some() && flood != other);
        let mut places: Vec<_> = (0..4).map(|_| queue.place(flood).expect("half")).collect();
        assert!(matches!(queue.place(flood).map(drop), Err(Error::QueueFull { limit: 8, .. })));
        places.extend((0..2).map(|_| queue.place(other).expect("half of the rest")));
        assert!(queue.place(other).is_err() && queue.place(flood).is_err());
        // A broken stream of the flood still gets its place.
        places.push(queue.readmit(flood));
        drop(places);
        assert!(queue.place(flood).is_ok());
        assert_eq!(queue.waiting(), 0);
    }

    /// Ten requests leave in ten seconds, and the longest wait is six seconds: six requests may wait.
    #[tokio::test(start_paused = true)]
    async fn a_request_that_would_wait_too_long_is_refused_at_once() {
        let six = 6.0.try_into().expect("a time");
        let config = Config { queue_timeout_secs: six, queue_size: 40, ..Config::default() };
        let queue = queue(&config);
        let mut places: VecDeque<_> = (0..5).map(|_| queue.place(None).expect("room")).collect();
        for _ in 0..SECONDS {
            places.push_back(queue.place(None).expect("too early to tell"));
            tokio::time::advance(Duration::from_secs(1)).await;
            places.pop_front().expect("the first").served();
        }
        places.push_back(queue.place(None).expect("the sixth"));
        match queue.place(None).map(drop) {
            Err(Error::QueueSlow { wait, retry_after, .. }) => {
                assert_eq!((wait, retry_after), (Duration::from_secs(7), 1));
            }
            other => panic!("{other:?}"),
        }
        places.clear();
        places.extend((0..40).map(|_| queue.place(None).expect("the queue was empty")));
    }

    /// The rate of an earlier queue does not count for requests that come at once from several threads.
    #[tokio::test(start_paused = true)]
    async fn requests_that_come_at_once_find_the_queue_empty() {
        let six = 6.0.try_into().expect("a time");
        let queue = queue(&Config { queue_timeout_secs: six, ..Config::default() });
        let runtime = Handle::current();
        for round in 0..300 {
            let place = queue.place(None).expect("an empty queue");
            tokio::time::advance(Duration::from_secs(5)).await;
            place.served();
            tokio::time::advance(Duration::from_secs(6)).await;
            let arrived = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        let _clock = runtime.enter();
                        arrived.fetch_add(1, Ordering::SeqCst);
                        while arrived.load(Ordering::SeqCst) < 2 {
                            std::hint::spin_loop();
                        }
                        let places = [(); 2].map(|()| queue.place(None));
                        assert!(places.iter().all(Result::is_ok), "round {round}");
                    });
                }
            });
        }
    }
}
