//! The data path: read the request, choose a worker, send, hand the response on.
//!
//! A client that leaves drops the future (before the response) or the body (in it), and with it the
//! connection to the worker: nothing here has to notice.

pub mod endpoint;
pub mod headers;
pub mod request;
pub mod select;

use std::{sync::Arc, time::Instant};

use http::{Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use smallvec::SmallVec;
use tokio::time::sleep;

use crate::{
    body::{ResponseBody, WorkerBody},
    error::Error,
    fleet::{
        worker::{Booking, Worker},
        worker_id::WorkerId,
    },
    key::RouteKey,
    metrics::{Metrics, UpstreamFailure},
    proxy::{
        endpoint::Endpoint,
        request::WorkerRequest,
        select::{Selection, Wish},
    },
    router::Router,
    server::{framing::Framing, journal::Journal},
    upstream::{Connection, UpstreamError},
};

/// Answers a request of the data plane with the response of a worker.
pub async fn forward(
    router: &Arc<Router>,
    endpoint: Endpoint,
    request: Request<Incoming>,
    framing: &Framing,
    journal: Option<&Journal>,
) -> Result<Response<ResponseBody>, Error> {
    let in_flight = router.gate.enter().ok_or(Error::Draining)?;
    let abort = AbortCount(Some(&router.metrics));
    let request = match WorkerRequest::read(request, router.config.max_payload_size).await {
        Ok(request) => request,
        Err(error) => return abort.disarm(Err(error)),
    };
    framing.end(request.body.len());
    let received = Instant::now();
    let limit = router.config.request_timeout_secs.get();
    let mut deadline = Box::pin(sleep(limit));
    let reply = tokio::select! {
        biased;
        reply = obtain(router, endpoint, &request, received, journal) => reply,
        () = deadline.as_mut() => {
            router.metrics.upstream_error(UpstreamFailure::Timeout);
            Err(Error::Timeout { after: limit })
        }
    };
    let Reply { response, connection, booking } = abort.disarm(reply)?;
    let (mut head, incoming) = response.into_parts();
    headers::for_client(&mut head.headers);
    head.version = Version::HTTP_11;
    let router = Arc::clone(router);
    let body =
        WorkerBody::new(incoming, connection, booking, received, deadline, router, in_flight);
    Ok(Response::from_parts(head, ResponseBody::Worker(Box::new(body))))
}

/// A response whose head has arrived, with all that its body needs.
struct Reply {
    response: Response<Incoming>,
    connection: Connection,
    booking: Booking,
}

/// Tries workers until one answers. Nothing has been sent to the client yet, so that another worker
/// may start from scratch.
async fn obtain(
    router: &Router,
    endpoint: Endpoint,
    request: &WorkerRequest,
    received: Instant,
    journal: Option<&Journal>,
) -> Result<Reply, Error> {
    // A body without a key still goes to a worker, which is the one to judge it.
    let key = endpoint.key_route().map(|route| RouteKey::extract(route, &request.body).ok());
    let wish = key.as_ref().map_or(Wish::LeastLoaded, |key| Wish::Policy(key.as_ref()));
    let mut tried: SmallVec<[WorkerId; 4]> = SmallVec::new();
    let mut attempts = 0;
    let mut failure = None;
    let mut selection = router.select(wish, &tried);
    router.metrics.overhead.observe(received.elapsed());
    loop {
        let booking = match (selection, failure.take()) {
            (Selection::Booked(booking), _) => booking,
            (Selection::AllTried, Some(failure)) => return Err(failure),
            // All tried and yet no failure: cannot be told from none healthy, so wait likewise.
            (Selection::NoneHealthy | Selection::AllTried, _) => {
                router.wait_for_worker().await?;
                // Who is healthy now has passed a health check since it failed.
                tried.clear();
                selection = router.select(wish, &tried);
                continue;
            }
        };
        if attempts > 0 {
            router.metrics.retry();
        }
        attempts += 1;
        let worker = Arc::clone(booking.worker());
        if let Some(journal) = journal {
            journal.sent_to(&worker, booking.reason);
        }
        let outcome = send(router, &worker, request).await;
        let error = match outcome {
            Ok((response, _)) if is_refusal(response.status()) => {
                router.metrics.upstream_error(UpstreamFailure::Status);
                Error::WorkersBusy { attempts, status: response.status() }
            }
            Ok((response, connection)) => {
                return Ok(Reply { response, connection, booking });
            }
            Err(error) => {
                if error.is_local() {
                    tracing::warn!("worker {}: {error}", worker.url);
                    router.metrics.upstream_error(UpstreamFailure::Connect);
                } else {
                    router.suspect(&worker, kind(&error), &error);
                }
                Error::WorkersFailed { attempts, last: error.to_string() }
            }
        };
        if attempts > router.config.max_retries {
            return Err(error);
        }
        tried.push(worker.id);
        failure = Some(error);
        selection = router.select(wish, &tried);
    }
}

/// The worker cannot take the request now, but another may.
fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE)
}

/// One worker, one request: over an idle connection if there is one.
async fn send(
    router: &Router,
    worker: &Worker,
    request: &WorkerRequest,
) -> Result<(Response<Incoming>, Connection), UpstreamError> {
    if let Some(mut connection) = worker.pool.checkout() {
        router.metrics.connection(true);
        match connection.send(request.to(worker)).await {
            Ok(response) => return Ok((response, connection)),
            // Most likely the worker closed it while the request was under way. That says nothing
            // about its health; a new connection will.
            Err(error) => tracing::debug!("worker {}: idle connection: {error}", worker.url),
        }
    }
    router.metrics.connection(false);
    let mut connection = worker.pool.connect().await?;
    let response = connection.send(request.to(worker)).await?;
    Ok((response, connection))
}

fn kind(error: &UpstreamError) -> UpstreamFailure {
    match error {
        UpstreamError::Connect(_) | UpstreamError::ConnectTimeout(_) => UpstreamFailure::Connect,
        UpstreamError::Reset(_) | UpstreamError::TooLarge(_) => UpstreamFailure::Reset,
    }
}

/// Counts a request whose future is dropped, which is how a client's leaving looks from here.
struct AbortCount<'a>(Option<&'a Metrics>);

impl AbortCount<'_> {
    fn disarm<T>(mut self, outcome: T) -> T {
        self.0 = None;
        outcome
    }
}

impl Drop for AbortCount<'_> {
    fn drop(&mut self) {
        if let Some(metrics) = self.0 {
            metrics.client_abort();
        }
    }
}
