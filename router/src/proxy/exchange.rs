//! One request to one worker, until the start of its response has arrived and been checked.

use std::{
    pin::pin,
    sync::atomic::{AtomicBool, Ordering},
};

use bytes::Bytes;
use http::header;
use tokio::time::Instant;

use super::{
    attempt_error::AttemptError,
    peek::{PeekedBody, PeekedResponse},
    request::WorkerRequest,
};
use crate::{
    engine::{PROMPT_TOKENS, expect::Expect},
    error::Refusal,
    fleet::Replica,
    metrics::Metrics,
    upstream::{Connection, UpstreamError},
    wire::headers::find,
};

/// Maximum length of a refusal that is kept while other workers are tried. The body of a longer one is
/// dropped.
const MAX_REFUSAL: usize = 64 << 10;

/// A request that can be sent to any worker.
#[derive(Clone, Copy)]
pub(super) struct Exchange<'a> {
    pub(super) request: &'a WorkerRequest,
    pub(super) body: &'a Bytes,
    pub(super) expect: Expect,
    pub(super) metrics: &'a Metrics,
    /// When the worker was chosen.
    pub(super) begun: Instant,
    /// Set when a response head has the number of prompt tokens: the prompt is computed then.
    pub(super) prefilled: &'a AtomicBool,
}

impl Exchange<'_> {
    /// Sends the request to `replica` once `prefix` has resolved. Ends early if the worker is lost.
    pub(super) async fn with(
        &self,
        replica: &Replica,
        prefix: Option<impl Future<Output = ()> + Unpin>,
    ) -> Result<PeekedResponse, AttemptError> {
        // Pinned here: a future that is moved into another one takes its memory once more there.
        let asked = pin!(async {
            if let Some(prefix) = prefix {
                prefix.await;
            }
            self.send(replica).await
        });
        let lost = pin!(replica.backend.health.lost());
        tokio::select! {
            biased;
            outcome = asked => outcome,
            () = lost => Err(AttemptError::Lost),
        }
    }

    /// Sends the request over an idle connection, if there is one.
    async fn send(&self, replica: &Replica) -> Result<PeekedResponse, AttemptError> {
        let mut broken = None;
        if let Some(connection) = replica.backend.pool.checkout(self.begun.into_std()) {
            self.metrics.connection(true);
            let opened_at = connection.opened_at();
            match self.over(connection, replica).await {
                // The worker has probably closed the idle connection at this moment. A new connection shows whether
                // the worker is alive.
                Err(AttemptError::Broken(error @ UpstreamError::Reset(_))) => {
                    broken = Some((opened_at, error));
                }
                outcome => return outcome,
            }
        }
        self.metrics.connection(false);
        match replica.backend.pool.connect(broken.as_ref().map(|(opened_at, _)| *opened_at)).await {
            Ok(connection) => self.over(connection, replica).await,
            // The worker is gone, and the error of the first connection says more.
            Err(error) => Err(AttemptError::Broken(broken.map_or(error, |(_, error)| error))),
        }
    }

    async fn over(
        &self,
        mut connection: Connection,
        replica: &Replica,
    ) -> Result<PeekedResponse, AttemptError> {
        // A statement of its own, so that the future does not keep the request.
        let sending = connection.send(&self.request.to(replica, self.body));
        let head = sending.await?;
        let busy = matches!(head.status.as_u16(), 429 | 503);
        if busy || matches!(head.status.as_u16(), 500 | 502 | 504) {
            let body = match connection.read(MAX_REFUSAL).await {
                Err(UpstreamError::TooLarge(_)) => Bytes::new(),
                read => read?,
            };
            replica.backend.pool.checkin(connection, Instant::now().into_std());
            let refusal = Box::new(Refusal { status: head.status, headers: head.headers, body });
            return Err(if busy {
                AttemptError::Busy(refusal)
            } else {
                AttemptError::Failed(refusal)
            });
        }
        if find(&head.headers, &PROMPT_TOKENS).is_some() {
            self.prefilled.store(true, Ordering::Relaxed);
        }
        // A compressed body cannot be checked.
        let is_readable = !head.headers.contains_key(header::CONTENT_ENCODING);
        let expect =
            if head.status.is_success() && is_readable { self.expect } else { Expect::Anything };
        let begun = PeekedBody::read(&mut connection).await?;
        expect.check_start(&head.headers, &begun.bytes).map_err(AttemptError::Garbage)?;
        let begun = begun.read_start(expect, &mut connection).await?;
        let PeekedBody { bytes: first, ended } = begun;
        let received = Instant::now();
        if !ended {
            return Ok(PeekedResponse { head, first, received, rest: Some(connection) });
        }
        replica.backend.pool.checkin(connection, received.into_std());
        expect.check_whole(&first).map_err(AttemptError::Garbage)?;
        Ok(PeekedResponse { head, first, received, rest: None })
    }
}
