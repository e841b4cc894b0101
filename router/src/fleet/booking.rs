//! The load booked on a worker, and the share of one request in it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    correct::{Epoch, Prediction},
    fleet::{
        breaker::Outcome,
        computing::{Awaited, Promise},
        worker::Worker,
    },
    key::RouteKey,
    policy::Reason,
};

/// Work booked on a worker. On a cache line of its own: every request writes it, from any thread.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Load {
    /// Each counts as many times as it asks for answers, which an engine runs side by side.
    requests: AtomicU32,
    pending_tokens: AtomicU64,
}

impl Load {
    pub(super) fn requests(&self) -> u32 {
        self.requests.load(Ordering::Relaxed)
    }

    pub(super) fn pending_tokens(&self) -> u64 {
        self.pending_tokens.load(Ordering::Relaxed)
    }
}

/// The share of one request in its worker's load. Released by dropping it, on whatever path the
/// request ends, so the counters cannot drift.
#[derive(Debug)]
pub struct Booking {
    worker: Arc<Worker>,
    /// Why the policy chose this worker.
    pub reason: Reason,
    /// See [`Choice::at_home`](crate::policy::Choice::at_home).
    pub at_home: Option<bool>,
    pending_tokens: u64,
    requests: u32,
    /// What the worker had to compute before this request's first byte, its own prompt included.
    tokens_ahead: u64,
    /// The part of that which was there before.
    tokens_before: u64,
    /// How long the first byte of a stream took, until the worker reports its prompt.
    waited: Option<Duration>,
    booked: Instant,
    /// Until the first byte: since when it is waited for.
    waiting_since: Option<Instant>,
    /// Until the prompt is computed.
    epoch: Option<Epoch>,
    promise: Option<Promise>,
    /// Prefixes that the worker is computing for other requests, and which are computed first.
    awaited: Option<Awaited>,
    /// What the router expects of the worker's cache.
    pub prediction: Prediction,
    /// It takes the worker's engine to answer it.
    is_work: bool,
    /// The one request that a half-open breaker has let through, and nothing is known of it yet.
    on_trial: bool,
}

impl Worker {
    /// Books a request and the prompt tokens that the worker has yet to compute for it.
    pub fn book(self: &Arc<Self>, pending_tokens: u64, reason: Reason) -> Booking {
        let mut booking = self.book_light(pending_tokens, reason);
        booking.is_work = true;
        booking.on_trial = self.breaker.enter(Instant::now());
        booking
    }

    /// The same of a request whose answer says nothing of the worker's engine.
    pub fn book_light(self: &Arc<Self>, pending_tokens: u64, reason: Reason) -> Booking {
        let now = Instant::now();
        if self.load.requests.fetch_add(1, Ordering::Relaxed) == 0 {
            // It had nothing to say before; its silence begins now.
            self.pulse.begin(now);
        }
        let before = self.load.pending_tokens.fetch_add(pending_tokens, Ordering::Relaxed);
        Booking {
            at_home: None,
            pending_tokens,
            requests: 1,
            tokens_ahead: before + pending_tokens,
            tokens_before: before,
            waited: None,
            booked: now,
            waiting_since: Some(now),
            epoch: Some(self.learned.begin()),
            promise: None,
            awaited: None,
            prediction: Prediction::default(),
            is_work: false,
            on_trial: false,
            worker: Arc::clone(self),
            reason,
        }
    }
}

impl Booking {
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// It asks for more answers than one.
    pub fn add_answers(&mut self, more: u32) {
        self.worker.load.requests.fetch_add(more, Ordering::Relaxed);
        self.requests += more;
    }

    /// The worker should have the first `held` blocks of the prompt, or has been asked to compute them.
    /// Nothing is waited for where the engine itself computes a prefix once for all requests in its queue,
    /// and keeps their order.
    pub fn share_prefix(&mut self, key: &RouteKey, held: u32) {
        if self.worker.info.load().in_batch_prefix_sharing {
            return;
        }
        self.awaited = self.worker.computing.awaited(key, held, self.pending_tokens);
        if self.awaited.is_some() {
            self.worker.counters.prefix_waits.increment();
        }
        // The first byte of others comes with the last, and says nothing about the prefix.
        if key.stream {
            self.promise = self.worker.computing.promise(key, held);
        }
    }

    /// What to wait for before the request is sent, and no longer than all that is to be computed
    /// before its first byte should take.
    pub fn prefix_computed(&mut self) -> Option<impl Future<Output = ()> + use<>> {
        let limit = self.expected_prefill();
        self.awaited.take().map(|awaited| awaited.within(limit))
    }

    /// The first byte is out, so the prompt is computed: its tokens no longer stand in the way. Only of
    /// a streamed answer does it tell how long that took; others come when all is done.
    pub fn prefill_done(&mut self, streamed: bool) {
        if let Some(since) = self.waiting_since.take().filter(|_| streamed) {
            let waited = since.elapsed();
            self.worker.pace.observe(self.tokens_ahead, waited);
            self.worker.counters.first_token.observe(waited);
            self.waited = Some(waited);
        }
        self.release_tokens();
    }

    /// The worker reports how many tokens of the prompt it has computed: with the time of the first byte
    /// that tells its speed.
    pub fn computed(&mut self, tokens: u64) {
        if let Some(waited) = self.waited.take() {
            self.worker.speed.observe(self.tokens_before, tokens, waited);
        }
    }

    /// What the prompt should take to be computed, with all that is ahead of it.
    pub fn expected_prefill(&self) -> Duration {
        self.worker.pace.expected(self.tokens_ahead)
    }

    /// What the first byte may take, from the worker's pace so far.
    pub fn first_token_limit(&self) -> Duration {
        self.worker.first_token_limit(self.tokens_ahead)
    }

    /// Tells the worker's breaker how the request went: once for its beginning, and again when its
    /// response is whole, or breaks or stalls. That a server answers what takes no engine is no
    /// news; that it does not is.
    pub fn record(&mut self, outcome: Outcome) {
        if let (Outcome::Late(_), Some(since)) = (outcome, self.waiting_since) {
            // All that is known of this one's time is that it is longer.
            self.worker.pace.observe(self.tokens_ahead, since.elapsed());
        }
        if self.is_work && outcome == Outcome::Answered {
            self.worker.longest_answer.observe(self.booked.elapsed());
        }
        if !self.is_work && matches!(outcome, Outcome::Begun | Outcome::Answered) {
            return;
        }
        let on_trial = std::mem::take(&mut self.on_trial);
        self.worker.record(outcome, on_trial);
    }

    fn release_tokens(&mut self) {
        let tokens = std::mem::take(&mut self.pending_tokens);
        self.worker.load.pending_tokens.fetch_sub(tokens, Ordering::Relaxed);
        self.promise = None;
        if let Some(epoch) = self.epoch.take() {
            self.worker.learned.end(&epoch);
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.release_tokens();
        self.worker.load.requests.fetch_sub(self.requests, Ordering::Relaxed);
        if self.on_trial {
            self.worker.breaker.leave_trial();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, timeout};

    use super::*;
    use crate::{Config, router::Router};

    const TRIAL_AFTER: Duration = Duration::from_secs(5);

    fn worker() -> Arc<Worker> {
        let config = Config {
            worker_urls: vec!["http://127.0.0.1:1".parse().expect("a URL")],
            cb_failure_threshold: 1,
            cb_timeout_duration_secs: TRIAL_AFTER.as_secs_f64().try_into().expect("a time"),
            ..Config::default()
        };
        let router = Router::new(config).expect("a router");
        Arc::clone(&router.registry.workers()[0])
    }

    fn lets_through(worker: &Worker) -> bool {
        worker.breaker.lets_through(Instant::now())
    }

    #[tokio::test(start_paused = true)]
    async fn a_trial_without_an_outcome_leaves_its_place_to_the_next_request() {
        let late = Outcome::Late(Duration::from_secs(1));
        for outcome in [None, Some(Outcome::Busy), Some(late)] {
            let worker = worker();
            worker.book(0, Reason::Cold).record(Outcome::Failed);
            assert!(!lets_through(&worker), "{outcome:?}");
            advance(TRIAL_AFTER).await;
            assert!(lets_through(&worker), "{outcome:?}");
            let mut trial = worker.book(0, Reason::Cold);
            assert!(!lets_through(&worker), "{outcome:?}");
            // A stream that began before the breaker opened flows on: the worker is not stuck.
            worker.heard(Instant::now());
            if let Some(outcome) = outcome {
                trial.record(outcome);
            }
            drop(trial);
            assert!(lets_through(&worker), "{outcome:?}");
        }
    }

    fn prompt() -> RouteKey {
        RouteKey { blocks: (0..64).collect(), stream: true, ..RouteKey::default() }
    }

    fn sibling(worker: &Arc<Worker>) -> Booking {
        let mut booking = worker.book(1000, Reason::CacheHit);
        booking.share_prefix(&prompt(), 64);
        booking
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_a_prefix_whose_first_byte_is_out() {
        let worker = worker();
        let mut first = worker.book(1000, Reason::Cold);
        first.share_prefix(&prompt(), 0);
        let awaited = sibling(&worker).prefix_computed().expect("it is being computed");
        first.prefill_done(true);
        timeout(Duration::from_millis(1), awaited).await.expect("it is computed");
        assert!(sibling(&worker).prefix_computed().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_prefix_is_awaited_no_longer_than_it_should_take() {
        let worker = worker();
        let mut first = worker.book(1000, Reason::Cold);
        first.share_prefix(&prompt(), 0);
        let mut booking = sibling(&worker);
        let (begun, limit) = (Instant::now(), booking.expected_prefill());
        let awaited = booking.prefix_computed().expect("it is being computed");
        timeout(Duration::from_secs(3600), awaited).await.expect("the wait is limited");
        assert!(begun.elapsed() <= limit + Duration::from_millis(1), "{:?}", begun.elapsed());
    }
}
