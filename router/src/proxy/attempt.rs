//! Workers are tried until one has sent the beginning of its answer.
//!
//! What is worth another try: a connection that breaks or a worker that is lost, at once; a failure,
//! garbage or a first byte that is late, as long as the retry budget allows; a worker that is busy,
//! until all are. A 4xx is an answer.

use std::{pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use smallvec::SmallVec;
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};

use super::{
    Job, Reply,
    beginning::Beginning,
    exchange::{Exchange, Trouble},
    expect::Expect,
    rewrite,
    waiting::Waiting,
};
use crate::{
    admission::Lane,
    config::Config,
    error::{Error, Refusal},
    fleet::{
        registry::{any_expected, any_healthy},
        worker::{Booking, Outcome},
    },
    key::RouteKey,
    metrics::UpstreamFailure,
    names::WorkerId,
    router::{
        Router,
        select::{Selection, Wish},
    },
    upstream::UpstreamError,
};

/// A request that so many workers have died of is not tried on another.
const DEATHS: u32 = 2;

/// Why a round of tries ends without a reply.
pub(super) enum Stop {
    For(Error),
    AllBusy(Box<Refusal>),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::For(error)
    }
}

/// One round over the workers, in which none is asked twice.
pub(super) struct Round<'a> {
    job: &'a mut Job,
    body: Bytes,
    /// `body` is the client's own.
    is_original: bool,
    tried: SmallVec<[WorkerId; 4]>,
    /// The answer of the last busy worker.
    refusal: Option<Box<Refusal>>,
    /// Why the next attempt is another one.
    cause: Option<UpstreamFailure>,
}

impl<'a> Round<'a> {
    pub(super) fn new(job: &'a mut Job, body: Option<&Bytes>) -> Self {
        let is_original = body.is_none();
        let body = body.unwrap_or(&job.request.body).clone();
        Self { job, body, is_original, tried: SmallVec::new(), refusal: None, cause: None }
    }

    pub(super) async fn run(&mut self) -> Result<Reply, Stop> {
        let mut last = None;
        loop {
            let Some(booking) = self.choose(last.take())? else {
                // Boxed, here and elsewhere, what is rare and large: it would be part of the future
                // of every request.
                Box::pin(self.wait_for_healthy()).await?;
                // Who is healthy now has passed a health check since it failed.
                self.tried.clear();
                continue;
            };
            let worker = Arc::clone(booking.worker());
            let trouble = match self.attempt(booking).await {
                Ok(reply) => return Ok(reply),
                Err(trouble) => trouble,
            };
            self.tried.push(worker.id);
            if !matches!(trouble, Trouble::Busy(_)) {
                self.job.failures += 1;
                if !self.may_retry(&trouble) {
                    return Err(self.give_up(trouble));
                }
                if !trouble.is_free() {
                    sleep(pause(&self.job.router.config, self.job.failures)).await;
                }
            }
            self.cause = Some(trouble.failure());
            if let Trouble::Busy(refusal) = &trouble {
                self.refusal = Some(refusal.clone());
            }
            last = Some(trouble);
        }
    }

    /// The next worker to try, after `last` has gone wrong. `None` if there is none and it is worth
    /// waiting for one.
    fn choose(&mut self, last: Option<Trouble>) -> Result<Option<Booking>, Stop> {
        let begun = Instant::now();
        let job = &mut *self.job;
        let wish = match job.endpoint.key_route() {
            Some(_) => Wish::Policy(job.key.as_ref()),
            None if job.endpoint.is_work() => Wish::LeastLoaded,
            None => Wish::Light,
        };
        let selection = job.router.select(wish, job.model(), &self.tried);
        // Waits for a slot, in line or for a worker are none of it.
        if let Some(reading) = job.reading.take() {
            job.router.metrics.overhead.observe(reading + begun.elapsed());
        }
        match (selection, last) {
            (Selection::Booked(booking), _) => Ok(Some(booking)),
            // A busy worker will have room again, even if the other workers are lost.
            (Selection::AllTried, Some(trouble)) => match self.refusal.take() {
                Some(refusal) if trouble.is_free() => Err(Stop::AllBusy(refusal)),
                _ => Err(self.give_up(trouble)),
            },
            // All tried and yet no trouble: cannot be told from none healthy, so wait likewise.
            (Selection::NoneHealthy | Selection::AllTried, _) => Ok(None),
        }
    }

    async fn wait_for_healthy(&mut self) -> Result<(), Error> {
        if !self.job.endpoint.is_work() {
            // Such a request asks for the state of things, and this is it.
            return Err(Error::NoHealthyWorker { waited: Duration::ZERO });
        }
        let until = self.job.patience();
        let model = self.job.model();
        let Job { router, alarm, client, .. } = &mut *self.job;
        let queue = &router.queue;
        let place =
            if self.is_original { queue.place(*client) } else { Ok(queue.place_again(*client)) };
        let place = place.map_err(|refusal| {
            // A worker that is not down yet may be back after its next health check.
            let is_expected =
                router.queue.is_on() && any_expected(&router.registry.workers(), model);
            if is_expected { refusal } else { Error::NoHealthyWorker { waited: Duration::ZERO } }
        })?;
        let healthy = router.registry.wait_until(|workers| any_healthy(workers, model));
        if alarm.limit(until, healthy).await.is_none() {
            place.give_up();
            return Err(self.nobody_came());
        }
        place.served();
        Ok(())
    }

    fn nobody_came(&self) -> Error {
        if Instant::now() >= self.job.deadline {
            return self.job.out_of_time();
        }
        Error::NoHealthyWorker { waited: self.job.router.config.queue_timeout_secs.get() }
    }

    /// One worker.
    async fn attempt(&mut self, booking: Booking) -> Result<Reply, Trouble> {
        let Job { deadline, failures, .. } = *self.job;
        let model = self.job.lane();
        let asking = self.is_original.then(|| rewrite::asking_usage(self.job, booking.worker()));
        let asking = asking.flatten();
        let Job { router, request, key, endpoint, alarm, journal, attempts, deaths, .. } =
            &mut *self.job;
        *attempts += 1;
        let begun = Instant::now();
        router.metrics.retry(self.cause.take());
        let worker = Arc::clone(booking.worker());
        if let Some(trace) = journal.as_ref().and_then(|j| j.sent_to(&worker, booking.reason)) {
            request.name_trace(trace);
        }
        let key = key.as_ref();
        let mut pending = Pending { router, key, booking: Some(booking) };
        let expect = Expect::of(*endpoint, key);
        let prefilled = Notify::new();
        let exchange = Exchange {
            request,
            body: asking.as_ref().unwrap_or(&self.body),
            expect,
            metrics: &router.metrics,
            prefilled: &prefilled,
        };
        let prefix = pending.booking().prefix_computed().map(Box::pin);
        let asked = async {
            if let Some(prefix) = prefix {
                prefix.await;
            }
            exchange.with(&worker).await
        };
        let answer = pin!(async {
            tokio::select! {
                biased;
                outcome = asked => outcome,
                () = worker.lost() => Err(Trouble::Lost),
            }
        });
        let may_leave = || {
            // Moved once, a request that is late again is slow itself.
            failures < router.config.retries()
                && *deaths + 1 < DEATHS
                && has_other(router, model, worker.id, &self.tried)
                && afford_retry(router)
        };
        let waiting = Waiting { alarm, deadline, expect, prefilled: &prefilled };
        let outcome = waiting.on(pending.booking(), answer, may_leave).await;
        match outcome {
            Ok(beginning) => Ok(pending.has_begun(beginning, asking.is_some())),
            Err(trouble) => {
                *deaths += u32::from(trouble.is_death());
                note(router, &trouble, pending.booking(), begun);
                Err(trouble)
            }
        }
    }

    fn may_retry(&self, trouble: &Trouble) -> bool {
        let Job { router, deaths, failures, .. } = &*self.job;
        let allowed = match trouble {
            Trouble::Deadline => false,
            // It has been paid for already.
            Trouble::Late(_) => true,
            _ => trouble.is_free() || afford_retry(router),
        };
        allowed && *deaths < DEATHS && *failures <= router.config.retries()
    }

    /// What the client is told when nobody else can be asked.
    fn give_up(&self, trouble: Trouble) -> Stop {
        let Job { deaths, attempts, .. } = *self.job;
        Stop::For(match trouble {
            Trouble::Busy(refusal) => return Stop::AllBusy(refusal),
            _ if deaths >= DEATHS => Error::Poisonous { deaths },
            Trouble::Failed(refusal) => refusal.into(),
            Trouble::Deadline => self.job.out_of_time(),
            trouble => Error::WorkersFailed { attempts, last: trouble.to_string() },
        })
    }
}

/// A request on a worker of which nothing has come yet. If nothing ever does, because it fails or its
/// client leaves, then what the tree has noted of it is not so.
struct Pending<'a> {
    router: &'a Router,
    key: Option<&'a RouteKey>,
    booking: Option<Booking>,
}

impl Pending<'_> {
    fn booking(&mut self) -> &mut Booking {
        self.booking.as_mut().expect("contract: it is there until the request has begun")
    }

    fn has_begun(mut self, beginning: Beginning, asked_usage: bool) -> Reply {
        let Beginning { head, first, rest } = beginning;
        if head.status.is_client_error() {
            self.unlearn();
        }
        let mut booking = self.booking.take().expect("contract: it begins once");
        let streams = self.key.is_some_and(|key| key.stream);
        booking.prefill_done(streams && head.status.is_success());
        booking.record(Outcome::Begun);
        booking.worker().heard(Instant::now());
        Reply { head, first, rest, booking, asked_usage }
    }

    fn unlearn(&mut self) {
        if let (Some(key), Some(booking)) = (self.key, &mut self.booking) {
            self.router.unlearn(key, booking);
        }
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.unlearn();
    }
}

/// Tells those who keep count of an attempt that `begun` then.
fn note(router: &Router, trouble: &Trouble, booking: &mut Booking, begun: Instant) {
    if let Some(outcome) = trouble.outcome() {
        booking.record(outcome);
    }
    let worker = booking.worker();
    match trouble {
        // The kernel of a busy worker's machine has no place for one more connection.
        Trouble::Broken(UpstreamError::ConnectTimeout(_))
            if worker.heard_since(begun) || !router.registry.has_other(worker) =>
        {
            router.metrics.upstream_error(trouble.failure());
        }
        Trouble::Broken(error) if !error.is_local() => {
            router.suspect(worker, trouble.failure(), error);
        }
        Trouble::Broken(_) | Trouble::Garbage(_) | Trouble::Late(_) => {
            router.metrics.upstream_error(trouble.failure());
            tracing::warn!("worker {}: {trouble}", worker.url);
        }
        _ => router.metrics.upstream_error(trouble.failure()),
    }
}

/// A worker that has not been asked in this round takes requests for the model.
fn has_other(router: &Router, model: Lane, current: WorkerId, tried: &[WorkerId]) -> bool {
    let is_other = |id| id != current && !tried.contains(&id);
    router
        .registry
        .workers()
        .iter()
        .any(|worker| is_other(worker.id) && worker.takes_requests() && worker.may_serve(model))
}

fn afford_retry(router: &Router) -> bool {
    let now = Instant::now();
    router.budget.spend(router.queue.ended(now), now)
}

/// With jitter, or all that have failed together would come back together.
fn pause(config: &Config, failures: u32) -> Duration {
    let first = Duration::from_millis(config.retry_initial_backoff_ms);
    let most = Duration::from_millis(config.retry_max_backoff_ms);
    let pause = first.saturating_mul(1 << (failures - 1).min(16)).min(most);
    pause.mul_f64(0.5 + fastrand::f64())
}
