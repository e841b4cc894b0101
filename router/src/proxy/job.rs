//! One request of a client, from its last byte to its end.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    task::spawn_blocking,
    time::{Instant, Sleep, sleep_until},
};

use crate::{
    body::replay,
    error::Error,
    key::{self, Route, RouteKey},
    names::ModelName,
    proxy::{endpoint::Endpoint, queue::Slot, request::WorkerRequest},
    router::Router,
    server::journal::Journal,
    shutdown::InFlight,
};

/// All that a request holds while no worker is chosen for it. Once the response has begun its body
/// owns this, so that dropping the body at any moment lets go of everything.
pub struct Job {
    pub router: Arc<Router>,
    pub endpoint: Endpoint,
    pub request: WorkerRequest,
    /// `None` if the endpoint has no prompt, or the body none that the router can read. Such a
    /// request still goes to a worker, which is the one to judge it.
    pub key: Option<RouteKey>,
    /// When its last byte had been read.
    pub received: Instant,
    /// When it must have ended.
    pub deadline: Instant,
    pub alarm: Alarm,
    pub journal: Option<Arc<Journal>>,
    /// Workers that have been asked.
    pub(super) attempts: u32,
    /// Attempts in a row that count against --max-retries: all but those on busy workers.
    pub(super) failures: u32,
    /// Workers that have broken the connection when they had this request.
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
            key,
            received,
            deadline,
            alarm: Alarm::new(deadline),
            journal,
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
        matters.then(|| key::model_of(&self.request.body)).flatten()
    }

    /// Until when it may wait in the queue, all its waits together.
    pub(super) fn patience(&mut self) -> Instant {
        let limit = self.router.config.queue_timeout_secs.get();
        let until = self.patient_until.get_or_insert_with(|| Instant::now() + limit);
        self.deadline.min(*until)
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

/// One timer for all the deadlines of a request, whichever comes next. A later deadline than the one
/// before costs nothing: the timer goes off early, once, and is set anew.
pub struct Alarm(Pin<Box<Sleep>>);

impl Alarm {
    pub fn new(at: Instant) -> Self {
        Self(Box::pin(sleep_until(at)))
    }

    /// Ready once `at` has passed.
    pub fn poll(&mut self, at: Instant, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if at < self.0.deadline() {
                self.0.as_mut().reset(at);
            }
            ready!(self.0.as_mut().poll(cx));
            if at <= self.0.deadline() {
                return Poll::Ready(());
            }
            self.0.as_mut().reset(at);
        }
    }

    /// What `future` resolves to, or `None` if it has not by `at`.
    pub async fn limit<T>(&mut self, at: Instant, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            Poll::Pending => self.poll(at, cx).map(|()| None),
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    /// The clock stands still while anything moves and jumps to the next timer when nothing does.
    #[tokio::test(start_paused = true)]
    async fn each_deadline_is_kept_whatever_was_set_before() {
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let mut alarm = Alarm::new(after(100));
        for seconds in [20, 5, 30, 100, 200, 40] {
            let already = begun.elapsed();
            assert_eq!(alarm.limit(after(seconds), pending::<()>()).await, None);
            assert_eq!(begun.elapsed(), already.max(Duration::from_secs(seconds)));
        }
        assert_eq!(alarm.limit(after(300), async { 1 }).await, Some(1));
    }
}
