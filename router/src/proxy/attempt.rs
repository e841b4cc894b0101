//! Sends a request to one worker after another, until one has sent the start of a response.
//!
//! A broken connection or a lost worker is retried at once. An error status, garbage or a late first byte is
//! retried within the retry budget, or without it if another worker was busy. If a worker is busy, the others are tried
//! until all are busy. A 4xx is a response, not a failure.

use std::{
    pin::pin,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use bytes::Bytes;
use smallvec::SmallVec;
use tokio::time::{Instant, sleep};

use super::{
    attempt_error::AttemptError, exchange::Exchange, job::Job, peek::PeekedResponse, reply::Reply,
    waiting::Waiting,
};
use crate::{
    config::Config,
    engine::expect::Expect,
    error::{Error, Refusal},
    fleet::{
        Backend, LoadGuard, Outcome, Replica,
        registry::{any_expected, any_healthy, replicas_of},
    },
    key::RouteKey,
    metrics::UpstreamFailure,
    names::{ModelName, WorkerId},
    router::{
        Router,
        select::{Placement, RouteClass},
    },
    upstream::UpstreamError,
};

/// A request fails when this many workers have died with it.
const MAX_DEATHS: u32 = 2;

/// The decision at the end of a round without a response.
pub(super) enum RetryDecision {
    /// The request fails.
    Fail(Error),
    /// All workers are busy: the request waits in the queue. Holds the response of the last busy worker.
    Queue(Box<Refusal>),
}

impl From<Error> for RetryDecision {
    fn from(error: Error) -> Self {
        Self::Fail(error)
    }
}

/// One round over the workers. No worker is asked twice in a round.
pub(super) struct Round<'a> {
    job: &'a mut Job,
    body: Bytes,
    /// Whether `body` is the body of the client.
    is_original: bool,
    tried: SmallVec<[WorkerId; 4]>,
    /// The response of the last busy worker.
    refusal: Option<Box<Refusal>>,
    /// The failure of the previous attempt.
    cause: Option<UpstreamFailure>,
}

impl<'a> Round<'a> {
    pub(super) fn new(job: &'a mut Job, body: Option<&Bytes>) -> Self {
        let is_original = body.is_none();
        let body = body.unwrap_or(&job.request.body).clone();
        let tried = job.failed.clone();
        Self { job, body, is_original, tried, refusal: None, cause: None }
    }

    pub(super) async fn run(&mut self) -> Result<Reply, RetryDecision> {
        let mut last = None;
        loop {
            let Some(guard) = self.choose(last.take())? else {
                // Boxed because it is rare and large: it would be part of the future of every request.
                Box::pin(self.wait_for_healthy()).await?;
                // A worker that is healthy now has passed a health check after its failure.
                self.tried.clear();
                self.job.failed.clear();
                continue;
            };
            let replica = Arc::clone(guard.replica());
            let error = match self.attempt(guard, &replica).await {
                Ok(reply) => return Ok(reply),
                Err(error) => error,
            };
            self.tried.push(replica.id);
            if !matches!(error, AttemptError::Busy(_)) {
                self.job.failures += 1;
                self.exclude(&replica.backend);
                if !self.may_retry(&error) {
                    return Err(self.decide(error));
                }
                if !error.needs_no_budget() {
                    sleep(pause(&self.job.router.config, self.job.failures)).await;
                }
            }
            self.cause = Some(error.failure());
            if let AttemptError::Busy(refusal) = &error {
                self.refusal = Some(refusal.clone());
            }
            last = Some(error);
        }
    }

    /// Excludes all workers of a process on which the request has failed.
    fn exclude(&mut self, backend: &Backend) {
        let replicas = self.job.router.registry.replicas();
        let own = replicas_of(&replicas, backend).iter().map(|replica| replica.id);
        self.job.failed.extend(own.clone());
        self.tried.extend(own);
    }

    /// Chooses the next worker; `last` is the error of the previous attempt. Returns `None` if no worker is
    /// healthy: then the request waits for one.
    fn choose(
        &mut self,
        last: Option<AttemptError>,
    ) -> Result<Option<Box<LoadGuard>>, RetryDecision> {
        let begun = Instant::now();
        let job = &mut *self.job;
        let class = match job.endpoint.key_route() {
            Some(_) => RouteClass::Policy(job.key.as_ref()),
            None if job.endpoint.is_work() => RouteClass::LeastLoaded,
            None => RouteClass::Light,
        };
        let selection = job.router.select(class, job.model(), &self.tried, begun);
        // The overhead excludes the waits for a slot, in the queue, and for a healthy worker.
        if let Some(reading) = job.reading.take() {
            job.router.metrics.overhead.observe(reading + begun.elapsed());
        }
        match (selection, last) {
            (Placement::Worker(guard), _) => Ok(Some(guard)),
            // A busy worker will have room again, even if the last one has failed.
            (Placement::AllTried, Some(error)) => match self.refusal.take() {
                Some(refusal) => Err(RetryDecision::Queue(refusal)),
                None => Err(self.decide(error)),
            },
            // All workers are excluded and none has failed: the same as no healthy worker.
            (Placement::NoneHealthy | Placement::AllTried, _) => Ok(None),
        }
    }

    async fn wait_for_healthy(&mut self) -> Result<(), Error> {
        if !self.job.endpoint.is_work() {
            // A light request does not wait: it reports the present state.
            return Err(Error::NoHealthyWorker { waited: Duration::ZERO });
        }
        let until = self.job.queue_deadline();
        let model = self.job.model();
        let Job { router, timer, client, .. } = &mut *self.job;
        let queue = &router.queue;
        let place =
            if self.is_original { queue.place(*client) } else { Ok(queue.readmit(*client)) };
        let place = place.map_err(|refusal| {
            // A suspect worker may be back after its next health check.
            let is_expected =
                router.queue.is_on() && any_expected(&router.registry.replicas(), model);
            if is_expected { refusal } else { Error::NoHealthyWorker { waited: Duration::ZERO } }
        })?;
        let healthy = router.registry.wait_until(|replicas| any_healthy(replicas, model));
        let waiting = timer.limit(until, healthy);
        if place.unless_aborted(&mut queue.aborts(), waiting).await?.is_none() {
            place.expired();
            return Err(self.no_worker_in_time());
        }
        place.served();
        Ok(())
    }

    fn no_worker_in_time(&self) -> Error {
        if Instant::now() >= self.job.deadline {
            return self.job.deadline_error();
        }
        Error::NoHealthyWorker { waited: self.job.router.config.queue_timeout_secs.get() }
    }

    /// Sends the request to one worker.
    async fn attempt(
        &mut self,
        guard: Box<LoadGuard>,
        replica: &Replica,
    ) -> Result<Reply, AttemptError> {
        self.count_attempt(&guard);
        let asking = self.is_original.then(|| self.job.body_with_usage(guard.backend())).flatten();
        let begun = guard.reserved_at();
        let model = self.job.line_key();
        let Job { deadline, failures, .. } = *self.job;
        let Job { router, request, key, endpoint, timer, deaths, .. } = &mut *self.job;
        let key = key.as_ref();
        let mut pending = Pending { router, key, guard: Some(guard) };
        let expect = Expect::of(*endpoint, key);
        let prefilled = AtomicBool::new(false);
        let exchange = Exchange {
            request,
            body: asking.as_ref().unwrap_or(&self.body),
            expect,
            metrics: &router.metrics,
            begun,
            prefilled: &prefilled,
        };
        let prefix = pending.guard().prefix_computed().map(Box::pin);
        let answer = pin!(exchange.with(replica, prefix));
        let may_leave = || {
            // The request has moved once. If it is late again, the request itself is slow.
            failures < router.config.retries()
                && *deaths + 1 < MAX_DEATHS
                && has_other(router, model, &replica.backend, &self.tried)
                && take_retry(router)
        };
        let waiting = Waiting { timer, deadline, expect, prefilled: &prefilled };
        let outcome = waiting.on(pending.guard(), answer, may_leave).await;
        match outcome {
            Ok(peek) => Ok(pending.start(peek, asking.is_some())),
            Err(error) => {
                *deaths += u32::from(error.is_death());
                record_failure(router, &error, pending.guard(), begun);
                Err(error)
            }
        }
    }

    /// Counts the attempt, logs it, and names it in the trace context of the request.
    fn count_attempt(&mut self, guard: &LoadGuard) {
        let Job { router, request, log, attempts, .. } = &mut *self.job;
        *attempts += 1;
        router.metrics.retry(self.cause.take());
        if let Some(trace) = log.as_ref().and_then(|log| log.sent_to(guard.replica(), guard.reason))
        {
            request.set_trace_context(trace);
        }
    }

    fn may_retry(&self, error: &AttemptError) -> bool {
        let Job { router, deaths, failures, .. } = &*self.job;
        let allowed = match error {
            AttemptError::Deadline => false,
            // `may_leave` has already taken the retry from the budget.
            AttemptError::Late(_) => true,
            // The request waits for a busy worker in any case: that is no additional load.
            _ => error.needs_no_budget() || self.refusal.is_some() || take_retry(router),
        };
        allowed && *deaths < MAX_DEATHS && *failures <= router.config.retries()
    }

    /// Ends the round: no other worker can be asked.
    fn decide(&self, error: AttemptError) -> RetryDecision {
        let Job { deaths, attempts, .. } = *self.job;
        RetryDecision::Fail(match error {
            AttemptError::Busy(refusal) => return RetryDecision::Queue(refusal),
            _ if deaths >= MAX_DEATHS => Error::Poisonous { deaths },
            AttemptError::Failed(refusal) => refusal.into(),
            AttemptError::Deadline => self.job.deadline_error(),
            error => Error::WorkersFailed { attempts, last: error.to_string() },
        })
    }
}

/// A request on a worker before the start of its response. It is dropped if the attempt fails or the client
/// disconnects. Dropping it takes the insertion into the tree back.
struct Pending<'a> {
    router: &'a Router,
    key: Option<&'a RouteKey>,
    guard: Option<Box<LoadGuard>>,
}

impl Pending<'_> {
    fn guard(&mut self) -> &mut LoadGuard {
        self.guard.as_mut().expect("contract: the guard is there until the response has started")
    }

    fn start(mut self, peek: PeekedResponse, asked_usage: bool) -> Reply {
        let PeekedResponse { head, first, received, rest } = peek;
        if head.status.is_client_error() {
            self.retract_insertion();
        }
        let mut guard = self.guard.take().expect("contract: a response starts once");
        let streams = self.key.is_some_and(|key| key.stream);
        guard.prefill_done(streams && head.status.is_success());
        guard.record(Outcome::Begun);
        guard.backend().received(received);
        Reply { head, first, received, rest, guard, asked_usage }
    }

    fn retract_insertion(&mut self) {
        if let (Some(key), Some(guard)) = (self.key, &mut self.guard) {
            self.router.retract_insertion(key, guard);
        }
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.retract_insertion();
    }
}

/// Records the failure of an attempt that was sent at `begun`: on the worker, in the metrics, in the log.
fn record_failure(router: &Router, error: &AttemptError, guard: &mut LoadGuard, begun: Instant) {
    if let Some(outcome) = error.outcome() {
        guard.record(outcome);
    }
    let backend = guard.backend();
    match error {
        // The listen backlog of a busy worker may be full.
        AttemptError::Broken(UpstreamError::ConnectTimeout(_))
            if backend.received_since(begun) || !router.registry.has_other(backend) =>
        {
            router.metrics.upstream_error(error.failure());
        }
        AttemptError::Broken(cause) if !cause.is_local() => {
            router.suspect(backend, error.failure(), cause);
        }
        AttemptError::Broken(_) | AttemptError::Garbage(_) | AttemptError::Late(_) => {
            router.metrics.upstream_error(error.failure());
            tracing::warn!("worker {}: {error}", backend.url);
        }
        _ => router.metrics.upstream_error(error.failure()),
    }
}

/// Whether a worker of another process, not yet asked in this round, takes requests for the model.
fn has_other(
    router: &Router,
    model: Option<ModelName>,
    current: &Arc<Backend>,
    tried: &[WorkerId],
) -> bool {
    router.registry.replicas().iter().any(|replica| {
        let backend = &replica.backend;
        let is_other = !Arc::ptr_eq(backend, current) && !tried.contains(&replica.id);
        is_other && backend.takes_requests() && backend.may_serve(model)
    })
}

fn take_retry(router: &Router) -> bool {
    let now = Instant::now();
    router.budget.spend(router.queue.ended(now), now)
}

/// The pause before a retry. It has jitter: requests that failed together must not come back together.
fn pause(config: &Config, failures: u32) -> Duration {
    let first = Duration::from_millis(config.retry_initial_backoff_ms);
    let most = Duration::from_millis(config.retry_max_backoff_ms);
    let pause = first.saturating_mul(1 << (failures - 1).min(16)).min(most);
    pause.mul_f64(0.5 + fastrand::f64())
}

#[cfg(test)]
mod tests {
    use std::io;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;
    use crate::{fleet::Phase, metrics::Ejection, policy::Reason};

    const OUT_OF_FILES: i32 = 24;
    const CONNECTION_REFUSED: i32 = 111;

    #[tokio::test]
    async fn a_router_that_is_out_of_files_does_not_blame_its_workers() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let config = Config { worker_urls: vec![url.parse().expect("a URL")], ..Config::default() };
        let router = Router::new(config).expect("a config to start with");
        // Responds to its health checks.
        let serving = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.expect("it listens");
                let mut buffer = [0; 4096];
                while stream.read(&mut buffer).await.is_ok_and(|count| count > 0) {
                    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
                    stream.write_all(answer).await.expect("it is read");
                }
            }
        });
        router.registry.wait_until(|replicas| any_healthy(replicas, None)).await;
        let replica = Arc::clone(&router.registry.replicas()[0]);
        for (code, ejections) in [(OUT_OF_FILES, 0), (CONNECTION_REFUSED, 1)] {
            let error = UpstreamError::Connect(io::Error::from_raw_os_error(code));
            let mut guard = replica.reserve(0, Reason::Cold);
            record_failure(&router, &AttemptError::Broken(error), &mut guard, Instant::now());
            assert_eq!(replica.backend.phase() == Phase::Healthy, ejections == 0, "{code}");
            assert_eq!(
                replica.backend.counters.ejections.get(Ejection::Request),
                ejections,
                "{code}"
            );
        }
        serving.abort();
        router.retire();
    }
}
