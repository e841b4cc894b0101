//! One request of a client, from its last byte to the end of its response.

use std::{cell::OnceCell, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName};
use smallvec::SmallVec;
use tokio::{task::spawn_blocking, time::Instant};

use crate::{
    admission::{Client, LineKey, Slot},
    config::Config,
    deadline_timer::{SharedTimer, TakenTimer},
    endpoint::Endpoint,
    engine::{Runtime, continuation, include_usage},
    error::Error,
    fleet::{Backend, registry::known},
    heap::boxed,
    key::{self, Route, RouteKey},
    names::{ModelName, WorkerId},
    proxy::request::WorkerRequest,
    router::Router,
    shutdown::InFlight,
    telemetry::request_log::RequestLog,
    wire::headers::find,
};

/// All resources of a request except its load on a worker. The response body owns the job once the response has
/// started, so dropping the body releases everything. Boxed, because it is large and passed on.
pub struct Job {
    pub router: Arc<Router>,
    pub endpoint: Endpoint,
    pub request: WorkerRequest,
    /// The client for the fair queue; `None` if clients do not take turns.
    pub(super) client: Option<Client>,
    /// `None` if the endpoint has no prompt, or the router cannot read it. The request still goes to a worker,
    /// which decides on it.
    pub key: Option<RouteKey>,
    /// The model in the body; read on first use.
    model: OnceCell<Option<ModelName>>,
    /// When the last byte of the request was read.
    pub received: Instant,
    /// When the response must have ended.
    pub deadline: Instant,
    pub timer: TakenTimer,
    pub log: Option<Arc<RequestLog>>,
    /// Time spent on reading the key. The first choice of a worker takes it and adds its own time.
    pub(super) reading: Option<Duration>,
    /// Attempts so far.
    pub(super) attempts: u32,
    /// Failed attempts that count against --max-retries: all except attempts on busy workers.
    pub(super) failures: u32,
    /// The workers of these failures. A request that leaves the queue does not return to them while others are busy.
    pub(super) failed: SmallVec<[WorkerId; 4]>,
    /// Times that a worker broke the connection or froze while it had this request.
    pub deaths: u32,
    /// The slot under --max-concurrent-requests, once the request has one.
    pub(super) slot: Option<Slot>,
    /// End of the time in the queue; set when the request first waits.
    queue_until: Option<Instant>,
    _in_flight: InFlight,
}

/// Bytes of a body whose key takes about a millisecond to read.
const LARGE_BODY: usize = 2 << 20;

/// Request header with the time limit of the client in milliseconds, for the whole response.
const TIMEOUT_HEADER: HeaderName = HeaderName::from_static("x-request-timeout-ms");

impl Job {
    pub async fn new(
        router: &Arc<Router>,
        endpoint: Endpoint,
        mut request: WorkerRequest,
        client: Option<Client>,
        in_flight: InFlight,
        log: Option<Arc<RequestLog>>,
        timer: &SharedTimer,
    ) -> Box<Self> {
        let received = Instant::now();
        let deadline = received + time_limit(&router.config, request.headers());
        let mut key = match endpoint.key_route() {
            Some(route) => read_key(route, &request.body).await,
            None => None,
        };
        let reading = Some(received.elapsed());
        if let Some(key) = &mut key {
            key.session = request.session().or(key.session);
        }
        if continuation::is_possible(&router.config, endpoint, key.as_ref(), &request.body) {
            request.ask_for_replay();
        }
        boxed(|| Self {
            router: Arc::clone(router),
            endpoint,
            request,
            client,
            key,
            model: OnceCell::new(),
            received,
            deadline,
            timer: timer.take(deadline),
            log,
            reading,
            attempts: 0,
            failures: 0,
            failed: SmallVec::new(),
            deaths: 0,
            slot: None,
            queue_until: None,
            _in_flight: in_flight,
        })
    }

    /// The model in the body, if the workers serve different models.
    pub(super) fn model(&self) -> Option<ModelName> {
        let matters = self.router.registry.is_mixed();
        // Read once: it scans the whole body.
        let model = || *self.model.get_or_init(|| key::model_of(&self.request.body));
        matters.then(model).flatten()
    }

    /// The line for this request: one for each served model, one for all other requests.
    pub(super) fn line_key(&self) -> LineKey {
        let model = self.model()?;
        known(&self.router.registry.replicas(), Some(model))
    }

    /// End of the time in the queue, for all waits of the request together.
    pub(super) fn queue_deadline(&mut self) -> Instant {
        let limit = self.router.config.queue_timeout_secs.get();
        let until = self.queue_until.get_or_insert_with(|| Instant::now() + limit);
        self.deadline.min(*until)
    }

    /// Resets the time in the queue for a continuation: the earlier waits were for the broken response.
    pub(super) fn reset_queue_deadline(&mut self) {
        self.queue_until = None;
    }

    /// The error for a request whose time in the queue has ended.
    pub(super) fn queue_timeout_error(&self) -> Error {
        if Instant::now() >= self.deadline {
            return self.deadline_error();
        }
        let waited = self.router.config.queue_timeout_secs.get();
        Error::QueueTimeout { waited, retry_after: self.router.queue.retry_after_s() }
    }

    /// The body with a request for token counts, if `backend` reports the counts of a stream only on request and the
    /// client leaves `stream_options` open. This project's workers report the counts in the head of the response.
    pub(super) fn body_with_usage(&self, backend: &Backend) -> Option<Bytes> {
        let key = self.key.as_ref().filter(|key| key.stream && !key.has_stream_options)?;
        let is_openai = matches!(self.endpoint, Endpoint::ChatCompletions | Endpoint::Completions);
        let runtime = backend.info.load().runtime;
        let understands = matches!(runtime, Some(Runtime::Sglang | Runtime::Vllm));
        let is_asked = is_openai && understands && !key.continues;
        is_asked.then(|| include_usage::ask(&self.request.body)).flatten()
    }

    pub(super) fn deadline_error(&self) -> Error {
        Error::Timeout { after: self.deadline - self.received }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.router.metrics.duration.observe(self.received.elapsed());
    }
}

/// The time for the whole response: the limit of the client, at most --request-timeout-secs.
fn time_limit(config: &Config, headers: &HeaderMap) -> Duration {
    let limit = config.request_timeout_secs.get();
    let own = find(headers, &TIMEOUT_HEADER).and_then(|value| value.to_str().ok()?.parse().ok());
    own.map_or(limit, |own| Duration::from_millis(own).min(limit))
}

/// Reads the key of `body`. A large body is read on another thread, so that the other requests of this thread do
/// not wait.
async fn read_key(route: Route, body: &Bytes) -> Option<RouteKey> {
    if body.len() < LARGE_BODY {
        return RouteKey::extract(route, body).ok();
    }
    let body = body.clone();
    let reading = spawn_blocking(move || RouteKey::extract(route, &body).ok());
    // An error means that the task has panicked: then there is no key.
    reading.await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::WorkerInfo;

    /// Each attempt needs the model, and a body may have hundreds of megabytes.
    #[tokio::test]
    async fn the_body_is_read_once_for_its_model() {
        let urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"];
        let worker_urls = urls.map(|url| url.parse().expect("a URL")).to_vec();
        let config = Config { worker_urls, ..Config::default() };
        let router = Router::new(config).expect("a config to start with");
        let models = br#"{"data":[{"id":"m"}]}"#;
        let info = WorkerInfo::default().with_models(models);
        router.registry.replicas()[0].backend.info.store(Arc::new(info));
        router.registry.announce();
        let in_flight = router.gate.enter().expect("it serves");
        let request = WorkerRequest::of_body(br#"{"model":"m"}"#);
        let timer = SharedTimer::default();
        let mut job =
            Job::new(&router, Endpoint::OtherV1, request, None, in_flight, None, &timer).await;
        assert_eq!(job.model(), Some(ModelName::new("m")));
        job.request.release();
        assert_eq!(job.model(), Some(ModelName::new("m")));
        router.retire();
    }
}
