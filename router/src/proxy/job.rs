//! One request of a client, from its last byte to its end.

use std::{cell::OnceCell, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{task::spawn_blocking, time::Instant};

use crate::{
    admission::{Client, Lane, Slot},
    alarm::Alarm,
    endpoint::Endpoint,
    error::Error,
    fleet::registry::known,
    key::{self, Route, RouteKey},
    names::ModelName,
    proxy::{replay, request::WorkerRequest},
    router::Router,
    shutdown::InFlight,
    telemetry::journal::Journal,
};

/// All that a request holds while no worker is chosen for it. Once the response has begun its body
/// owns this, so that dropping the body at any moment lets go of everything.
pub struct Job {
    pub router: Arc<Router>,
    pub endpoint: Endpoint,
    pub request: WorkerRequest,
    /// Whose turns it takes in the queue; `None` if the clients do not take turns.
    pub(super) client: Option<Client>,
    /// `None` if the endpoint has no prompt, or the body none that the router can read. Such a
    /// request still goes to a worker, which is the one to judge it.
    pub key: Option<RouteKey>,
    /// The model that the body names, once somebody has asked.
    model: OnceCell<Option<ModelName>>,
    /// When its last byte had been read.
    pub received: Instant,
    /// When it must have ended.
    pub deadline: Instant,
    pub alarm: Alarm,
    pub journal: Option<Arc<Journal>>,
    /// What it took to read the key, until the first choice of a worker adds its own time.
    pub(super) reading: Option<Duration>,
    /// Workers that have been asked.
    pub(super) attempts: u32,
    /// Attempts in a row that count against --max-retries: all but those on busy workers.
    pub(super) failures: u32,
    /// Workers that have broken the connection or frozen when they had this request.
    pub deaths: u32,
    /// From the moment in which it need not wait in the queue any more.
    pub(super) slot: Option<Slot>,
    /// When waiting in the queue will have taken too long; once it has waited.
    patient_until: Option<Instant>,
    _in_flight: InFlight,
}

/// About a millisecond's work to read.
const LARGE_BODY: usize = 2 << 20;

/// In which a client may say how many milliseconds it will wait for the end of the response.
const TIMEOUT_HEADER: &str = "x-request-timeout-ms";

impl Job {
    pub async fn new(
        router: &Arc<Router>,
        endpoint: Endpoint,
        mut request: WorkerRequest,
        client: Option<Client>,
        in_flight: InFlight,
        journal: Option<Arc<Journal>>,
    ) -> Self {
        let received = Instant::now();
        let limit = router.config.request_timeout_secs.get();
        let wish = request.headers().get(TIMEOUT_HEADER).and_then(|value| value.to_str().ok());
        let wish = wish.and_then(|text| text.parse().ok()).map(Duration::from_millis);
        let deadline = received + wish.map_or(limit, |wish| wish.min(limit));
        let mut key = match endpoint.key_route() {
            Some(route) => read_key(route, &request.body).await,
            None => None,
        };
        let reading = Some(received.elapsed());
        if let Some(key) = &mut key {
            key.session = request.session().or(key.session);
        }
        if replay::is_possible(&router.config, endpoint, key.as_ref(), &request.body) {
            request.ask_for_replay();
        }
        Self {
            router: Arc::clone(router),
            endpoint,
            request,
            client,
            key,
            model: OnceCell::new(),
            received,
            deadline,
            alarm: Alarm::new(deadline),
            journal,
            reading,
            attempts: 0,
            failures: 0,
            deaths: 0,
            slot: None,
            patient_until: None,
            _in_flight: in_flight,
        }
    }

    /// The model that it names, where that matters.
    pub(super) fn model(&self) -> Option<ModelName> {
        let matters = self.router.registry.is_mixed();
        // Read once: it takes a look at the whole body.
        let model = || *self.model.get_or_init(|| key::model_of(&self.request.body));
        matters.then(model).flatten()
    }

    /// The line in which it waits: one for each model that is served, and one for all other requests.
    pub(super) fn lane(&self) -> Lane {
        known(&self.router.registry.workers(), self.model())
    }

    /// Until when it may wait in the queue, all its waits together.
    pub(super) fn patience(&mut self) -> Instant {
        let limit = self.router.config.queue_timeout_secs.get();
        let until = self.patient_until.get_or_insert_with(|| Instant::now() + limit);
        self.deadline.min(*until)
    }

    /// The waits until now were for its first answer; that one has broken.
    pub(super) fn wait_anew(&mut self) {
        self.patient_until = None;
    }

    /// Why it waits no longer.
    pub(super) fn out_of_patience(&self) -> Error {
        if Instant::now() >= self.deadline {
            return self.out_of_time();
        }
        let waited = self.router.config.queue_timeout_secs.get();
        Error::QueueTimeout { waited, retry_after: self.router.queue.advice() }
    }

    pub(super) fn out_of_time(&self) -> Error {
        Error::Timeout { after: self.deadline - self.received }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.router.metrics.duration.observe(self.received.elapsed());
    }
}

/// Where it takes longer than the other requests of this thread should wait, on another thread.
async fn read_key(route: Route, body: &Bytes) -> Option<RouteKey> {
    if body.len() < LARGE_BODY {
        return RouteKey::extract(route, body).ok();
    }
    let body = body.clone();
    let reading = spawn_blocking(move || RouteKey::extract(route, &body).ok());
    // An error would be a panic in it, and then there is no key.
    reading.await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Config, fleet::worker::WorkerInfo};

    /// Each attempt asks for the model, and a body may have hundreds of megabytes.
    #[tokio::test]
    async fn the_body_is_read_once_for_its_model() {
        let urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"];
        let worker_urls = urls.map(|url| url.parse().expect("a URL")).to_vec();
        let config = Config { worker_urls, ..Config::default() };
        let router = Router::new(config).expect("a config to start with");
        let models = br#"{"data":[{"id":"m"}]}"#;
        let info = WorkerInfo::default().with_models(models);
        router.registry.workers()[0].info.store(Arc::new(info));
        router.registry.announce();
        let in_flight = router.gate.enter().expect("it serves");
        let request = WorkerRequest::of_body(br#"{"model":"m"}"#);
        let mut job = Job::new(&router, Endpoint::OtherV1, request, None, in_flight, None).await;
        assert_eq!(job.model(), Some(ModelName::new("m")));
        job.request.drop_body();
        assert_eq!(job.model(), Some(ModelName::new("m")));
        router.retire();
    }
}
