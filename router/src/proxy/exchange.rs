//! One request with one worker, until the beginning of its answer is there and makes sense.

use bytes::Bytes;
use http::header;
use thiserror::Error;
use tokio::sync::Notify;

use super::{
    Rest,
    beginning::{Beginning, Begun},
    expect::Expect,
    request::WorkerRequest,
};
use crate::{
    error::Refusal,
    fleet::worker::{Outcome, Worker},
    metrics::{Metrics, UpstreamFailure},
    upstream::{Connection, UpstreamError},
    wire::headers::PROMPT_TOKENS,
};

/// A worker's refusal is kept while others are asked. A longer one is not worth it.
const REFUSAL: usize = 64 << 10;

/// Why a worker gave no good answer.
#[derive(Debug, Error)]
pub(super) enum Trouble {
    /// 429 or 503: back-pressure, which says nothing about the next request.
    #[error("it is busy: {}", .0.status)]
    Busy(Box<Refusal>),
    #[error("it answered {}", .0.status)]
    Failed(Box<Refusal>),
    #[error("it answered 200 with {0}")]
    Garbage(&'static str),
    #[error(transparent)]
    Broken(#[from] UpstreamError),
    /// Dead or frozen, as its health checks have found.
    #[error("it was lost")]
    Lost,
    #[error("no first byte within {0:?}")]
    Late(std::time::Duration),
    /// The request itself has no time left.
    #[error("the request's time was up")]
    Deadline,
}

impl Trouble {
    /// Another worker may be asked without more ado: it is not load that has caused this, and asking
    /// again costs no worker that is alive a request more than it would have had.
    pub(super) fn is_free(&self) -> bool {
        matches!(self, Self::Broken(_) | Self::Lost)
    }

    /// The worker may have died or frozen because of the request.
    pub(super) fn is_death(&self) -> bool {
        matches!(
            self,
            Self::Broken(UpstreamError::Reset(_) | UpstreamError::Cut(_))
                | Self::Lost
                | Self::Late(_)
        )
    }

    pub(super) fn failure(&self) -> UpstreamFailure {
        match self {
            Self::Busy(_) => UpstreamFailure::Busy,
            Self::Failed(_) => UpstreamFailure::Status,
            Self::Garbage(_) => UpstreamFailure::Garbage,
            Self::Broken(UpstreamError::Connect(_) | UpstreamError::ConnectTimeout(_)) => {
                UpstreamFailure::Connect
            }
            Self::Broken(_) => UpstreamFailure::Reset,
            Self::Lost => UpstreamFailure::Lost,
            Self::Late(_) | Self::Deadline => UpstreamFailure::Timeout,
        }
    }

    /// What it tells the worker's breaker.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        match self {
            Self::Busy(_) => Some(Outcome::Busy),
            Self::Broken(error) if error.is_local() => None,
            Self::Failed(_) | Self::Garbage(_) | Self::Broken(_) => Some(Outcome::Failed),
            Self::Late(limit) => Some(Outcome::Late(*limit)),
            Self::Lost | Self::Deadline => None,
        }
    }
}

/// What is asked, of whichever worker.
#[derive(Clone, Copy)]
pub(super) struct Exchange<'a> {
    pub(super) request: &'a WorkerRequest,
    pub(super) body: &'a Bytes,
    pub(super) expect: Expect,
    pub(super) metrics: &'a Metrics,
    /// Rings when a head has come that says how long the prompt is: then it has been computed.
    pub(super) prefilled: &'a Notify,
}

impl Exchange<'_> {
    /// Over an idle connection if there is one.
    pub(super) async fn with(&self, worker: &Worker) -> Result<Beginning, Trouble> {
        let mut broken = None;
        if let Some(connection) = worker.pool.checkout() {
            self.metrics.connection(true);
            let opened_at = connection.opened_at();
            match self.over(connection, worker).await {
                // Most likely the worker closed it while the request was under way. That says
                // nothing about its health; a new connection will.
                Err(Trouble::Broken(error @ UpstreamError::Reset(_))) => {
                    broken = Some((opened_at, error));
                }
                outcome => return outcome,
            }
        }
        self.metrics.connection(false);
        match worker.pool.connect(broken.as_ref().map(|(opened_at, _)| *opened_at)).await {
            Ok(connection) => self.over(connection, worker).await,
            // It broke because the worker is gone.
            Err(error) => Err(Trouble::Broken(broken.map_or(error, |(_, error)| error))),
        }
    }

    async fn over(
        &self,
        mut connection: Connection,
        worker: &Worker,
    ) -> Result<Beginning, Trouble> {
        let request = self.request.to(worker, self.body.clone());
        let (head, mut incoming) = connection.send(request).await?.into_parts();
        let busy = matches!(head.status.as_u16(), 429 | 503);
        if busy || matches!(head.status.as_u16(), 500 | 502 | 504) {
            let body = match connection.read(&mut incoming, REFUSAL).await {
                Err(UpstreamError::TooLarge(_)) => Bytes::new(),
                read => read?,
            };
            worker.pool.checkin(connection);
            let refusal = Box::new(Refusal { status: head.status, headers: head.headers, body });
            return Err(if busy { Trouble::Busy(refusal) } else { Trouble::Failed(refusal) });
        }
        if head.headers.contains_key(PROMPT_TOKENS) {
            self.prefilled.notify_one();
        }
        // What is compressed cannot be judged.
        let is_readable = !head.headers.contains_key(header::CONTENT_ENCODING);
        let expect =
            if head.status.is_success() && is_readable { self.expect } else { Expect::Anything };
        let begun = Begun::read(&mut connection, &mut incoming).await?;
        expect.begins(&head.headers, &begun.bytes).map_err(Trouble::Garbage)?;
        let begun = begun.read_on(expect, &mut connection, &mut incoming).await?;
        let Begun { bytes: first, ended } = begun;
        if !ended {
            return Ok(Beginning { head, first, rest: Some(Rest { incoming, connection }) });
        }
        worker.pool.checkin(connection);
        expect.is_whole(&first).map_err(Trouble::Garbage)?;
        Ok(Beginning { head, first, rest: None })
    }
}
