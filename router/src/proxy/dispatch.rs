//! Dispatches a request: waits for its turn, and runs rounds of attempts until a worker responds. Until then the
//! client has received nothing, so any worker can start the response.

use std::{pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::timeout;

use super::{
    attempt::{RetryDecision, Round},
    job::Job,
    reply::Reply,
};
use crate::{
    admission::Ticket,
    error::{Error, Refusal},
};

/// A busy worker refuses within this time. After it, the request counts as accepted.
const ACCEPTED_AFTER: Duration = Duration::from_millis(10);

/// Returns the response of a worker to `job`, or the error for the client. `body` replaces the client's body: it
/// continues a broken stream, which goes before requests without a response.
pub async fn dispatch(job: &mut Job, body: Option<Bytes>) -> Result<Reply, Error> {
    job.failures = 0;
    job.failed.clear();
    let continues = body.is_some();
    if continues {
        job.reset_queue_deadline();
    }
    let mut refusal = None;
    if job.endpoint.is_work() {
        take_slot(job).await?;
    }
    // A new request does not overtake the line.
    if continues || !job.endpoint.is_work() || !job.router.queue.has_line(|| job.line_key()) {
        match Round::new(job, body.as_ref()).run().await {
            Ok(reply) => return Ok(reply),
            Err(RetryDecision::Fail(error)) => return Err(error),
            Err(RetryDecision::Queue(last)) if job.endpoint.is_work() => refusal = Some(last),
            Err(RetryDecision::Queue(last)) => return Err(last.into()),
        }
    }
    Box::pin(in_line(job, body.as_ref(), refusal)).await
}

/// Waits in the line and runs a round at each turn, until a worker takes the request or its time in the queue ends.
async fn in_line(
    job: &mut Job,
    body: Option<&Bytes>,
    mut refusal: Option<Box<Refusal>>,
) -> Result<Reply, Error> {
    let queue = Arc::clone(&job.router.queue);
    let mut aborts = queue.aborts();
    let joined = if body.is_some() {
        queue.join_front(job.line_key(), job.client)
    } else {
        let joined = queue.join(job.line_key(), job.client);
        joined.map_err(|full| answer(refusal.take(), full))?
    };
    let mut position = joined.position();
    let mut ticket = Some(joined);
    loop {
        // A worker refused after the ticket was passed on: the request returns to its position.
        let held = ticket.take().unwrap_or_else(|| queue.return_to(job.line_key(), position));
        position = held.position();
        let until = job.queue_deadline();
        let turn = held.turn(&mut job.timer, until);
        if !held.place().unless_aborted(&mut aborts, turn).await? {
            held.expired();
            return Err(answer(refusal, job.queue_timeout_error()));
        }
        ticket = Some(held);
        match round(job, body, &mut ticket).await {
            Ok(reply) => return Ok(reply),
            Err(RetryDecision::Fail(error)) => return Err(error),
            Err(RetryDecision::Queue(last)) => refusal = Some(last),
        }
    }
}

/// Prefers the refusal of a worker to the error of the router.
fn answer(refusal: Option<Box<Refusal>>, otherwise: Error) -> Error {
    refusal.map_or(otherwise, Error::from)
}

/// Takes a slot under --max-concurrent-requests, or waits for one.
async fn take_slot(job: &mut Job) -> Result<(), Error> {
    if job.slot.is_none() {
        job.slot = job.router.queue.try_enter();
    }
    if job.slot.is_none() {
        let until = job.queue_deadline();
        let slot = job.router.queue.enter(job.client, &mut job.timer, until);
        job.slot = Box::pin(slot).await?;
    }
    if job.slot.is_some() { Ok(()) } else { Err(job.queue_timeout_error()) }
}

/// Runs one round over the workers. The ticket is passed on as soon as a worker has taken the request, so that the next
/// request in the line may try.
async fn round(
    job: &mut Job,
    body: Option<&Bytes>,
    ticket: &mut Option<Ticket<'_>>,
) -> Result<Reply, RetryDecision> {
    let mut round = Round::new(job, body);
    let mut trying = pin!(round.run());
    if ticket.is_some()
        && let Ok(outcome) = timeout(ACCEPTED_AFTER, trying.as_mut()).await
    {
        if !matches!(outcome, Err(RetryDecision::Queue(_))) {
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
