//! What the data plane answers: a request from its first byte to the head of its response.

use std::{net::IpAddr, sync::Arc};

use http::{Request, Response, Version};
use hyper::body::Incoming;

use super::turn::Turn;
use crate::{
    body::ResponseBody,
    endpoint::Endpoint,
    error::Error,
    proxy::{Job, obtain, request::WorkerRequest},
    router::Router,
    telemetry::journal::Journal,
    wire::headers,
};

/// Answers a request of the data plane, which has come from `address`, with the response of a worker.
pub(super) async fn forward(
    router: &Arc<Router>,
    endpoint: Endpoint,
    request: Request<Incoming>,
    address: IpAddr,
    turn: &Turn,
    journal: Option<&Arc<Journal>>,
) -> Result<Response<ResponseBody>, Error> {
    if router.gate.is_draining() {
        return Err(Error::Draining);
    }
    let client = router.queue.client(request.headers(), address);
    let reading = AbortCount(Some(router));
    let request = WorkerRequest::read(request, router).await;
    let request = reading.disarm(request)?;
    turn.uploaded();
    // Not before: a drain does not wait for uploads.
    let in_flight = router.gate.enter().ok_or(Error::Draining)?;
    let mut job = Job::new(router, endpoint, request, client, in_flight, journal.cloned()).await;
    if job.key.as_ref().is_some_and(|key| key.continues) {
        let message = "`continuation` is a word between router and workers, not a field of the API";
        return Err(Error::BadRequest { param: "continuation", message: message.to_owned() });
    }
    // Declared after the job, so that an abort is counted before the request has left.
    let waiting = AbortCount(Some(router));
    let reply = obtain(&mut job, None).await;
    let mut reply = waiting.disarm(reply).map_err(|error| unless_stopping(router, error))?;
    headers::for_client(&mut reply.head.headers);
    reply.head.version = Version::HTTP_11;
    Ok(ResponseBody::of_worker(job, reply))
}

/// Workers that are stopped together with the router fail, and none of it is the request's fault.
fn unless_stopping(router: &Router, error: Error) -> Error {
    match error {
        Error::WorkersFailed { .. } | Error::NoHealthyWorker { .. } | Error::Poisonous { .. }
            if router.gate.is_draining() =>
        {
            Error::Draining
        }
        error => error,
    }
}

/// Counts a request whose future is dropped, which is how a client's leaving looks from here.
struct AbortCount<'a>(Option<&'a Router>);

impl AbortCount<'_> {
    fn disarm<T>(mut self, outcome: T) -> T {
        self.0 = None;
        outcome
    }
}

impl Drop for AbortCount<'_> {
    fn drop(&mut self) {
        // What the router itself gives up has a client that is still there.
        if let Some(router) = self.0.filter(|router| !router.gate.is_cut()) {
            router.metrics.client_abort();
        }
    }
}
