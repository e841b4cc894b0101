//! From a request to a reply worth showing: workers are tried until one has sent the first frame of
//! its body. Nothing has reached the client until then, so that another worker may start from scratch.

use std::sync::Arc;

use bytes::Bytes;
use http::{StatusCode, response::Parts};
use http_body::Body;
use hyper::body::Incoming;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::{
    error::Error,
    fleet::{
        worker::{Booking, Worker},
        worker_id::WorkerId,
    },
    metrics::UpstreamFailure,
    proxy::{
        Job,
        request::WorkerRequest,
        select::{Selection, Wish},
    },
    router::Router,
    server::journal::Journal,
    upstream::{Connection, UpstreamError},
};

/// A worker's response of which the first frame has arrived.
pub struct Reply {
    pub head: Parts,
    /// The first frame of the body; empty only if there is none.
    pub first: Bytes,
    /// The rest of the body, if `first` is not all of it.
    pub rest: Option<Rest>,
    pub booking: Booking,
}

/// A body in the middle, and the connection that it comes on.
pub struct Rest {
    pub incoming: Incoming,
    pub connection: Connection,
}

/// Has a worker answer `job`, with `body` instead of the client's if given.
pub async fn obtain(job: &mut Job, body: Option<Bytes>) -> Result<Reply, Error> {
    let Job { router, endpoint, request, key, received, deadline, alarm, journal, .. } = job;
    let wish = match endpoint.key_route() {
        Some(_) => Wish::Policy(key.as_ref()),
        None => Wish::LeastLoaded,
    };
    let body = body.unwrap_or_else(|| request.body.clone());
    match alarm
        .limit(*deadline, try_workers(router, wish, request, &body, *received, journal.as_deref()))
        .await
    {
        Some(Ok(mut reply)) => {
            reply.booking.prefill_done();
            router.metrics.first_byte.observe(received.elapsed());
            Ok(reply)
        }
        Some(Err(error)) => Err(error),
        None => {
            router.metrics.upstream_error(UpstreamFailure::Timeout);
            Err(Error::Timeout { after: *deadline - *received })
        }
    }
}

async fn try_workers(
    router: &Router,
    wish: Wish<'_>,
    request: &WorkerRequest,
    body: &Bytes,
    received: Instant,
    journal: Option<&Journal>,
) -> Result<Reply, Error> {
    let mut tried: SmallVec<[WorkerId; 4]> = SmallVec::new();
    let mut attempts = 0;
    let mut failure = None;
    loop {
        let booking = match (router.select(wish, &tried), failure.take()) {
            (Selection::Booked(booking), _) => booking,
            (Selection::AllTried, Some(failure)) => return Err(failure),
            // All tried and yet no failure: cannot be told from none healthy, so wait likewise.
            (Selection::NoneHealthy | Selection::AllTried, _) => {
                router.wait_for_worker().await?;
                // Who is healthy now has passed a health check since it failed.
                tried.clear();
                continue;
            }
        };
        if attempts > 0 {
            router.metrics.retry();
        } else {
            router.metrics.overhead.observe(received.elapsed());
        }
        attempts += 1;
        let worker = Arc::clone(booking.worker());
        if let Some(journal) = journal {
            journal.sent_to(&worker, booking.reason);
        }
        let error = match send(router, &worker, request, body).await {
            Ok((head, ..)) if is_refusal(head.status) => {
                router.metrics.upstream_error(UpstreamFailure::Status);
                Error::WorkersBusy { attempts, status: head.status }
            }
            Ok((head, first, rest)) => return Ok(Reply { head, first, rest, booking }),
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
    }
}

/// The worker cannot take the request now, but another may.
fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE)
}

type Beginning = (Parts, Bytes, Option<Rest>);

/// One worker, one request: over an idle connection if there is one.
async fn send(
    router: &Router,
    worker: &Worker,
    request: &WorkerRequest,
    body: &Bytes,
) -> Result<Beginning, UpstreamError> {
    if let Some(connection) = worker.pool.checkout() {
        router.metrics.connection(true);
        match send_over(connection, worker, request, body).await {
            Ok(beginning) => return Ok(beginning),
            // Most likely the worker closed it while the request was under way. That says nothing
            // about its health; a new connection will.
            Err(error) => tracing::debug!("worker {}: idle connection: {error}", worker.url),
        }
    }
    router.metrics.connection(false);
    let connection = worker.pool.connect().await?;
    send_over(connection, worker, request, body).await
}

async fn send_over(
    mut connection: Connection,
    worker: &Worker,
    request: &WorkerRequest,
    body: &Bytes,
) -> Result<Beginning, UpstreamError> {
    let response = connection.send(request.to(worker, body.clone())).await?;
    let (head, mut incoming) = response.into_parts();
    let first = connection.next_data(&mut incoming).await?.unwrap_or_default();
    if incoming.is_end_stream() {
        worker.pool.checkin(connection);
        return Ok((head, first, None));
    }
    Ok((head, first, Some(Rest { incoming, connection })))
}

fn kind(error: &UpstreamError) -> UpstreamFailure {
    match error {
        UpstreamError::Connect(_) | UpstreamError::ConnectTimeout(_) => UpstreamFailure::Connect,
        UpstreamError::Reset(_) | UpstreamError::TooLarge(_) => UpstreamFailure::Reset,
    }
}
