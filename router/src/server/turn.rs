//! Whose turn it is on a connection: what its stream, its service and the request in it share.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Poll, Waker},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{alarm::Alarm, error::Error};

/// Idle for this long, a connection is taken from hyper until its client says something.
pub(super) const REST_AFTER: Duration = Duration::from_secs(1);

/// They all run in the task of the connection, so that none ever waits for the lock.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn(Arc<Mutex<State>>);

#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is asked for alone")]
struct State {
    /// There has been a head on this connection.
    used: bool,
    /// From the end of a head to the end of its response.
    answering: bool,
    /// The request has arrived whole, as far as its stream or its reader can tell.
    uploaded: bool,
    draining: bool,
    congested: bool,
    quiet_since: Option<Instant>,
    /// Why the request at hand cannot be shown to hyper.
    refusal: Option<Error>,
    /// Reads when the response has ended.
    next: Option<Waker>,
}

impl Turn {
    /// A head has been read, or what came instead is refused.
    pub(super) fn begin(&self, refusal: Option<Error>) {
        let mut state = self.0.lock();
        (state.used, state.answering, state.uploaded) = (true, true, false);
        (state.refusal, state.quiet_since) = (refusal, None);
    }

    pub(super) fn is_used(&self) -> bool {
        self.0.lock().used
    }

    /// What speaks against the request that hyper has just handed over.
    pub(super) fn take_refusal(&self) -> Option<Error> {
        self.0.lock().refusal.take()
    }

    /// The request's body has arrived whole.
    pub(super) fn uploaded(&self) {
        self.0.lock().uploaded = true;
    }

    pub(super) fn is_uploaded(&self) -> bool {
        self.0.lock().uploaded
    }

    pub(super) fn is_answering(&self) -> bool {
        self.0.lock().answering
    }

    /// `waker` is told of the end of the response.
    pub(super) fn wake_at_end(&self, waker: &Waker) {
        self.0.lock().next = Some(waker.clone());
    }

    pub(super) fn end(&self) {
        let mut state = self.0.lock();
        (state.answering, state.quiet_since) = (false, Some(Instant::now()));
        if let Some(next) = state.next.take() {
            next.wake();
        }
    }

    /// Nothing is under way on the connection, from now on.
    pub(super) fn is_quiet(&self) {
        self.0.lock().quiet_since = Some(Instant::now());
    }

    /// A part of a head has come.
    pub(super) fn disturb(&self) {
        self.0.lock().quiet_since = None;
    }

    /// Whether bytes for the client wait for it to take them.
    pub(super) fn congest(&self, congested: bool) {
        self.0.lock().congested = congested;
    }

    /// Resolves when nothing has been under way for a while. To be polled after the connection, whose
    /// task is the only one that changes anything here.
    pub(super) async fn rests(&self, alarm: &mut Alarm) {
        poll_fn(|cx| {
            let state = self.0.lock();
            match state.quiet_since {
                // What hyper has not got rid of yet would be lost with its buffers.
                Some(since) if !state.congested => alarm.poll(since + REST_AFTER, cx),
                _ => Poll::Pending,
            }
        })
        .await;
    }

    /// Uploads are no longer waited for.
    pub(super) fn drain(&self) {
        self.0.lock().draining = true;
    }

    pub(super) fn is_draining(&self) -> bool {
        self.0.lock().draining
    }
}
