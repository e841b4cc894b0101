//! The reservation of one request in the load of its replica.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    backend::Backend,
    evidence::Outcome,
    replica::Replica,
    single_flight::{PrefillTicket, PrefillWaiter},
};
use crate::{
    correct::{Epoch, Prediction},
    key::RouteKey,
    policy::Reason,
};

/// The reservation of one request on its replica: one in flight, with its prompt tokens. Dropping the guard releases
/// both, so no path of a request can leave load behind.
#[derive(Debug)]
pub struct LoadGuard {
    replica: Arc<Replica>,
    /// Reason of the policy for this worker.
    pub reason: Reason,
    /// See [`Choice::at_owner`](crate::policy::Choice::at_owner).
    pub at_owner: Option<bool>,
    pending_tokens: u64,
    requests: u32,
    /// Prompt tokens that the worker has to compute before the first byte, this prompt included.
    tokens_ahead: u64,
    /// The tokens among these that other requests had reserved.
    tokens_before: u64,
    /// Time to the first byte of a stream; kept until the worker reports the computed tokens.
    waited: Option<Duration>,
    reserved_at: Instant,
    /// Start of the wait for the first byte; `None` once it has arrived.
    waiting_since: Option<Instant>,
    /// `None` once the prompt is computed.
    epoch: Option<Epoch>,
    ticket: Option<PrefillTicket>,
    /// Waits for prefixes that the worker is computing for other requests.
    waiter: Option<PrefillWaiter>,
    /// The tree's prediction of the cached tokens.
    pub prediction: Prediction,
    /// Whether the engine has to work for this request.
    is_work: bool,
    /// Whether this is the trial request of a half-open breaker, without an outcome so far.
    on_trial: bool,
}

impl Replica {
    /// Reserves the load of a request that needs the engine: `pending_tokens` are its uncached prompt tokens.
    pub fn reserve(self: &Arc<Self>, pending_tokens: u64, reason: Reason) -> LoadGuard {
        let mut guard = self.reserve_light(pending_tokens, reason);
        guard.is_work = true;
        guard.on_trial = self.backend.breaker.enter(guard.reserved_at);
        guard
    }

    /// Reserves the load of a request that does not need the engine. Its outcome says nothing about the engine.
    pub fn reserve_light(self: &Arc<Self>, pending_tokens: u64, reason: Reason) -> LoadGuard {
        let now = Instant::now();
        self.load.add_requests(1);
        self.backend.last_activity.request_started(now);
        let before = self.load.add_tokens(pending_tokens);
        LoadGuard {
            at_owner: None,
            pending_tokens,
            requests: 1,
            tokens_ahead: before + pending_tokens,
            tokens_before: before,
            waited: None,
            reserved_at: now,
            waiting_since: Some(now),
            epoch: Some(self.learned.begin()),
            ticket: None,
            waiter: None,
            prediction: Prediction::default(),
            is_work: false,
            on_trial: false,
            replica: Arc::clone(self),
            reason,
        }
    }
}

impl LoadGuard {
    pub fn replica(&self) -> &Arc<Replica> {
        &self.replica
    }

    pub fn backend(&self) -> &Arc<Backend> {
        &self.replica.backend
    }

    pub fn reserved_at(&self) -> Instant {
        self.reserved_at
    }

    /// Adds `more` completions. Each request has one already.
    pub fn add_answers(&mut self, more: u32) {
        if more == 0 {
            return;
        }
        self.replica.load.add_requests(more);
        self.requests += more;
    }

    /// Joins the single flight of the prompt's prefix. `held` is the number of leading blocks that the worker has
    /// or has been asked to compute. Does nothing if the engine itself computes a prefix once for all requests in
    /// its queue.
    pub fn share_prefix(&mut self, key: &RouteKey, held: u32) {
        if self.replica.backend.info.load().in_batch_prefix_sharing {
            return;
        }
        self.waiter = self.replica.single_flight.waiter(key, held, self.pending_tokens);
        if self.waiter.is_some() {
            self.replica.counters.prefix_waits.increment();
        }
        // An answer in one piece arrives after its last token, so it does not tell when the prefix was computed.
        if key.stream {
            self.ticket = self.replica.single_flight.ticket(key, held);
        }
    }

    /// Returns a future that resolves when the prefixes are computed, at the latest after the expected prefill time.
    /// `None` if there is nothing to wait for.
    pub fn prefix_computed(&mut self) -> Option<impl Future<Output = ()> + use<>> {
        let waiter = self.waiter.take()?;
        Some(waiter.within(self.expected_prefill()))
    }

    /// Records the first byte: the prompt is computed, and its tokens are released. Only a streamed answer tells
    /// how long the prefill took.
    pub fn prefill_done(&mut self, streamed: bool) {
        if let Some(since) = self.waiting_since.take().filter(|_| streamed) {
            let waited = since.elapsed();
            self.replica.backend.limits.first_byte_time.observe(self.tokens_ahead, waited);
            self.replica.counters.first_token.observe(waited);
            self.waited = Some(waited);
        }
        self.release_tokens();
    }

    /// Records the number of prompt tokens that the worker has computed. With the time of the first byte it gives the
    /// speed of the worker. A worker that shares its steps has none: the prompts of others are in the time.
    pub fn computed(&mut self, tokens: u64) {
        let backend = &self.replica.backend;
        if let Some(waited) = self.waited.take()
            && !backend.info.load().shares_steps()
        {
            backend.speed.observe(self.tokens_before, tokens, waited);
        }
    }

    /// Expected time until the prompt and all prompts ahead of it are computed.
    pub fn expected_prefill(&self) -> Duration {
        self.replica.backend.limits.first_byte_time.expected(self.tokens_ahead)
    }

    /// The limit for the first byte, which follows from earlier first bytes of the worker.
    pub fn first_token_limit(&self) -> Duration {
        self.replica.backend.limits.first_token(self.tokens_ahead)
    }

    /// Passes an outcome to the breaker of the worker: once for the start of the response, and again when the
    /// response is complete, breaks or stalls. The success of a request that does not need the engine is not passed
    /// on.
    pub fn record(&mut self, outcome: Outcome) {
        if let (Outcome::Late(_), Some(since)) = (outcome, self.waiting_since) {
            // The first byte takes at least this long.
            let limits = &self.replica.backend.limits;
            limits.first_byte_time.observe(self.tokens_ahead, since.elapsed());
        }
        if self.is_work && outcome == Outcome::Answered {
            self.replica.backend.limits.answered(self.reserved_at.elapsed());
        }
        if !self.is_work && matches!(outcome, Outcome::Begun | Outcome::Answered) {
            return;
        }
        let on_trial = std::mem::take(&mut self.on_trial);
        self.replica.backend.record(outcome, on_trial);
    }

    fn release_tokens(&mut self) {
        let Some(epoch) = self.epoch.take() else { return };
        self.replica.load.remove_tokens(std::mem::take(&mut self.pending_tokens));
        self.ticket = None;
        self.replica.learned.end(&epoch);
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.release_tokens();
        self.replica.load.remove_requests(self.requests);
        self.replica.backend.last_activity.request_ended();
        if self.on_trial {
            self.replica.backend.breaker.leave_trial();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, timeout};

    use super::*;
    use crate::{Config, engine::WorkerInfo, router::Router};

    const TRIAL_AFTER: Duration = Duration::from_secs(5);

    fn worker() -> Arc<Replica> {
        let config = Config {
            worker_urls: vec!["http://127.0.0.1:1".parse().expect("a URL")],
            cb_failure_threshold: 1,
            cb_timeout_duration_secs: TRIAL_AFTER.as_secs_f64().try_into().expect("a time"),
            ..Config::default()
        };
        let router = Router::new(config).expect("a router");
        Arc::clone(&router.registry.replicas()[0])
    }

    fn admits(worker: &Replica) -> bool {
        worker.backend.breaker.admits(Instant::now())
    }

    #[tokio::test(start_paused = true)]
    async fn a_dp_rank_has_no_speed_of_its_own() {
        for (size, is_known) in [("1", true), ("8", false)] {
            let worker = worker();
            let info =
                format!(r#"{{"boot_id":"a","max_total_num_tokens":9,"attn_dp_size":{size}}}"#);
            worker.backend.info.store(Arc::new(WorkerInfo::parse(info.as_bytes())));
            for request in 0..60 {
                let tokens = 1000 + 100 * (request % 4);
                let mut guard = worker.reserve(tokens, Reason::Cold);
                advance(Duration::from_micros(200 * tokens)).await;
                guard.prefill_done(true);
                guard.computed(tokens);
            }
            assert_eq!(worker.backend.speed.token_seconds().is_some(), is_known, "{size}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_trial_without_an_outcome_leaves_its_place_to_the_next_request() {
        let late = Outcome::Late(Duration::from_secs(1));
        for outcome in [None, Some(Outcome::Busy), Some(late)] {
            let worker = worker();
            worker.reserve(0, Reason::Cold).record(Outcome::Failed);
            assert!(!admits(&worker), "{outcome:?}");
            advance(TRIAL_AFTER).await;
            assert!(admits(&worker), "{outcome:?}");
            let mut trial = worker.reserve(0, Reason::Cold);
            assert!(!admits(&worker), "{outcome:?}");
            // A stream that started before the breaker opened still flows, so the worker is not stuck.
            worker.backend.received(Instant::now());
            if let Some(outcome) = outcome {
                trial.record(outcome);
            }
            drop(trial);
            assert!(admits(&worker), "{outcome:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn long_pauses_of_streams_raise_the_limit_until_answers_without_them_lower_it() {
        let (worker, least) = (worker(), Duration::from_secs(2));
        assert_eq!(worker.backend.limits.pause(least), least);
        worker.backend.limits.stream_paused(Duration::from_secs(3));
        assert_eq!(worker.backend.limits.pause(least), Duration::from_secs(12));
        for _ in 0..400 {
            worker.reserve(0, Reason::Cold).record(Outcome::Answered);
        }
        assert_eq!(worker.backend.limits.pause(least), least);
    }

    fn prompt() -> RouteKey {
        RouteKey { blocks: (0..64).collect(), stream: true, ..RouteKey::default() }
    }

    fn another_request(worker: &Arc<Replica>) -> LoadGuard {
        let mut guard = worker.reserve(1000, Reason::CacheHit);
        guard.share_prefix(&prompt(), 64);
        guard
    }

    #[tokio::test(start_paused = true)]
    async fn no_request_waits_for_a_prefix_after_its_first_byte() {
        let worker = worker();
        let mut first = worker.reserve(1000, Reason::Cold);
        first.share_prefix(&prompt(), 0);
        let waiter = another_request(&worker).prefix_computed().expect("it is being computed");
        first.prefill_done(true);
        timeout(Duration::from_millis(1), waiter).await.expect("it is computed");
        assert!(another_request(&worker).prefix_computed().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_prefix_is_awaited_no_longer_than_it_should_take() {
        let worker = worker();
        let mut first = worker.reserve(1000, Reason::Cold);
        first.share_prefix(&prompt(), 0);
        let mut guard = another_request(&worker);
        let (begun, limit) = (Instant::now(), guard.expected_prefill());
        let waiter = guard.prefix_computed().expect("it is being computed");
        timeout(Duration::from_secs(3600), waiter).await.expect("the wait is limited");
        assert!(begun.elapsed() <= limit + Duration::from_millis(1), "{:?}", begun.elapsed());
    }
}
