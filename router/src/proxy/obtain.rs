//! From a request to a reply worth showing. Nothing has reached the client until then, so that another
//! worker may start from scratch.

use std::{pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use http::response::Parts;
use hyper::body::Incoming;
use tokio::time::timeout;

use super::{
    Job,
    attempt::{Round, Stop},
};
use crate::{
    admission::Ticket,
    error::{Error, Refusal},
    fleet::worker::Booking,
    upstream::Connection,
};

/// A worker that has not said that it is busy by then has probably taken the request.
const SILENT_CONSENT: Duration = Duration::from_millis(10);

/// A worker's response of which the beginning has arrived. Its status is anything but 429, 500 and
/// 502 to 504, which are errors here.
pub struct Reply {
    pub head: Parts,
    /// The beginning of the body: of a stream, at least the first event; of a JSON value, all of it
    /// that is not too long; empty only if there is none. All of it if there is no `rest`.
    pub first: Bytes,
    pub rest: Option<Rest>,
    pub booking: Booking,
    /// The worker was asked for counts of which the client has said nothing.
    pub asked_usage: bool,
}

/// A body in the middle, and the connection that it comes on.
pub struct Rest {
    pub incoming: Incoming,
    pub connection: Connection,
}

/// Has a worker answer `job`, with `body` instead of the client's if given: then it continues a stream, of
/// which the client waits for the next word, and goes before requests that have none yet.
pub async fn obtain(job: &mut Job, body: Option<Bytes>) -> Result<Reply, Error> {
    job.failures = 0;
    let continues = body.is_some();
    if continues {
        job.wait_anew();
    }
    let mut refusal = None;
    if job.endpoint.is_work() {
        take_slot(job).await?;
    }
    // Nobody else overtakes those who wait in line.
    if continues || !job.endpoint.is_work() || !job.router.queue.has_line(|| job.lane()) {
        match Round::new(job, body.as_ref()).run().await {
            Ok(reply) => return Ok(reply),
            Err(Stop::For(error)) => return Err(error),
            Err(Stop::AllBusy(last)) if job.endpoint.is_work() => refusal = Some(last),
            Err(Stop::AllBusy(last)) => return Err(last.into()),
        }
    }
    Box::pin(in_line(job, body.as_ref(), refusal)).await
}

/// Tries again whenever it is this request's turn, until somebody takes it or its patience ends.
async fn in_line(
    job: &mut Job,
    body: Option<&Bytes>,
    mut refusal: Option<Box<Refusal>>,
) -> Result<Reply, Error> {
    let queue = Arc::clone(&job.router.queue);
    let mut ticket: Option<Ticket<'_>> = None;
    let mut position = None;
    loop {
        let held = match (ticket.take(), position) {
            (Some(held), _) => held,
            // A worker was asked and has refused after a while: back to the place that it had.
            (None, Some(position)) => queue.return_to(job.lane(), position),
            (None, None) if body.is_some() => queue.step_in(job.lane(), job.client),
            (None, None) => queue
                .line_up(job.lane(), job.client)
                .map_err(|full| answer(refusal.take(), full))?,
        };
        position = Some(held.position());
        let until = job.patience();
        if !held.turn(&mut job.alarm, until).await {
            held.give_up();
            return Err(answer(refusal, job.out_of_patience()));
        }
        ticket = Some(held);
        match round(job, body, &mut ticket).await {
            Ok(reply) => return Ok(reply),
            Err(Stop::For(error)) => return Err(error),
            Err(Stop::AllBusy(last)) => refusal = Some(last),
        }
    }
}

/// What a worker has said is better than what the router can say.
fn answer(refusal: Option<Box<Refusal>>, otherwise: Error) -> Error {
    refusal.map_or(otherwise, Error::from)
}

/// Waits until one more request may be on the workers.
async fn take_slot(job: &mut Job) -> Result<(), Error> {
    if job.slot.is_none() {
        job.slot = job.router.queue.try_enter();
    }
    if job.slot.is_none() {
        let until = job.patience();
        let slot = job.router.queue.enter(job.client, &mut job.alarm, until);
        job.slot = Box::pin(slot).await?;
    }
    job.slot.as_ref().map(drop).ok_or_else(|| job.out_of_patience())
}

/// One round over the workers. The ticket is given up as soon as somebody has taken the request, so
/// that the next in line may try.
async fn round(
    job: &mut Job,
    body: Option<&Bytes>,
    ticket: &mut Option<Ticket<'_>>,
) -> Result<Reply, Stop> {
    let mut round = Round::new(job, body);
    let mut trying = pin!(round.run());
    if ticket.is_some()
        && let Ok(outcome) = timeout(SILENT_CONSENT, trying.as_mut()).await
    {
        if !matches!(outcome, Err(Stop::AllBusy(_))) {
            pass_on(ticket);
        }
        return outcome;
    }
    pass_on(ticket);
    trying.await
}

fn pass_on(ticket: &mut Option<Ticket<'_>>) {
    if let Some(ticket) = ticket.take() {
        ticket.served();
    }
}
