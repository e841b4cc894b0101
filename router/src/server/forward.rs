//! A data-plane request from its first byte to the head of its response.

use std::{net::IpAddr, sync::Arc};

use http::{Response, Version, request::Parts};

use super::request_body::RequestBody;
use crate::{
    body::ResponseBody,
    deadline_timer::SharedTimer,
    endpoint::Endpoint,
    error::Error,
    proxy::{Job, dispatch, request::WorkerRequest},
    router::Router,
    telemetry::request_log::RequestLog,
    wire::headers,
};

/// Answers a data-plane request of the client at `address` with the response of a worker. Fails with the error for
/// the client.
pub(super) async fn forward(
    router: &Arc<Router>,
    endpoint: Endpoint,
    head: Box<Parts>,
    body: RequestBody<'_>,
    address: IpAddr,
    timer: &SharedTimer,
    log: Option<&Arc<RequestLog>>,
) -> Result<Response<ResponseBody>, Error> {
    // Entered before the upload: a drain waits for the requests that have begun.
    let in_flight = router.gate.enter().ok_or(Error::Draining)?;
    let client = router.queue.client(&head.headers, address);
    let reading = AbortCount(Some(router));
    let body = body.read(router.config.max_payload_size, &router.bodies).await;
    let (body, memory) = reading.disarm(body)?;
    let request = WorkerRequest::new(head, body, memory, router.config.has_keys());
    let mut job = Job::new(router, endpoint, request, client, in_flight, log.cloned(), timer).await;
    if job.key.as_ref().is_some_and(|key| key.continues) {
        let message =
            "`continuation` is internal to router and workers; it is not a field of the API";
        return Err(Error::BadRequest { param: "continuation", message: message.to_owned() });
    }
    // Declared after the job, so that an abort is counted before the request has ended.
    let waiting = AbortCount(Some(router));
    let reply = dispatch(&mut job, None).await;
    let mut reply = waiting.disarm(reply).map_err(|error| unless_stopping(router, error))?;
    headers::for_client(&mut reply.head.headers);
    reply.head.version = Version::HTTP_11;
    Ok(ResponseBody::of_worker(job, reply))
}

/// Replaces the error by `Draining` during shutdown: workers that stop together with the router fail, too.
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

/// Counts an abort when the future of a request is dropped: the client has disconnected.
struct AbortCount<'a>(Option<&'a Router>);

impl AbortCount<'_> {
    fn disarm<T>(mut self, outcome: T) -> T {
        self.0 = None;
        outcome
    }
}

impl Drop for AbortCount<'_> {
    fn drop(&mut self) {
        // After the cut the router itself drops the requests.
        if let Some(router) = self.0.filter(|router| !router.gate.is_cut()) {
            router.metrics.client_abort();
        }
    }
}
