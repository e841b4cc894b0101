//! The keep-alive state of a connection, shared by its stream, its service and the present request.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Poll, Waker},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    deadline_timer::{DeadlineTimer, SharedTimer},
    error::Error,
};

/// Idle time after which a connection is taken from hyper until its client sends bytes.
pub(super) const RELEASE_AFTER: Duration = Duration::from_secs(1);

/// The shared state. All users run in the task of the connection, so no one ever waits for the lock.
#[derive(Clone, Debug, Default)]
pub(super) struct KeepAliveState(Arc<Mutex<State>>, SharedTimer);

#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts of one connection")]
struct State {
    /// Whether a head has arrived on this connection.
    used: bool,
    /// Whether a request is being answered: from the end of its head to the end of its response.
    answering: bool,
    /// Whether the body of the request has arrived completely.
    uploaded: bool,
    draining: bool,
    congested: bool,
    idle_since: Option<Instant>,
    /// The error of the refused request that hyper sees as a stand-in.
    refusal: Option<Error>,
    /// Woken at the end of the response.
    next: Option<Waker>,
}

impl KeepAliveState {
    /// The timer of the requests.
    pub(super) fn timer(&self) -> &SharedTimer {
        &self.1
    }

    /// Starts a request; `refusal` is its error if it is refused.
    pub(super) fn begin(&self, refusal: Option<Error>) {
        let mut state = self.0.lock();
        (state.used, state.answering, state.uploaded) = (true, true, false);
        (state.refusal, state.idle_since) = (refusal, None);
    }

    pub(super) fn is_used(&self) -> bool {
        self.0.lock().used
    }

    /// Takes the error of the request that hyper has just delivered.
    pub(super) fn take_refusal(&self) -> Option<Error> {
        self.0.lock().refusal.take()
    }

    /// Records that the body of the request has arrived completely.
    pub(super) fn uploaded(&self) {
        self.0.lock().uploaded = true;
    }

    pub(super) fn is_uploaded(&self) -> bool {
        self.0.lock().uploaded
    }

    pub(super) fn is_answering(&self) -> bool {
        self.0.lock().answering
    }

    /// Wakes `waker` at the end of the response.
    pub(super) fn wake_at_end(&self, waker: &Waker) {
        self.0.lock().next = Some(waker.clone());
    }

    pub(super) fn end(&self) {
        let mut state = self.0.lock();
        (state.answering, state.idle_since) = (false, Some(Instant::now()));
        if let Some(next) = state.next.take() {
            next.wake();
        }
    }

    /// Marks the connection as idle from now on.
    pub(super) fn start_idle(&self) {
        self.0.lock().idle_since = Some(Instant::now());
    }

    /// Records a part of a head: the connection is not idle.
    pub(super) fn record_bytes(&self) {
        self.0.lock().idle_since = None;
    }

    /// Sets whether bytes wait for the client.
    pub(super) fn set_congested(&self, congested: bool) {
        self.0.lock().congested = congested;
    }

    /// Resolves when the connection has been idle for [`RELEASE_AFTER`]. Must be polled after the connection in the
    /// same task: only that task changes the state.
    pub(super) async fn until_idle(&self, timer: &mut DeadlineTimer) {
        poll_fn(|cx| {
            let state = self.0.lock();
            match state.idle_since {
                // Unsent bytes would be lost with hyper's buffers.
                Some(since) if !state.congested => timer.poll(since + RELEASE_AFTER, cx),
                _ => Poll::Pending,
            }
        })
        .await;
    }

    /// Ends the wait for uploads.
    pub(super) fn drain(&self) {
        self.0.lock().draining = true;
    }

    pub(super) fn is_draining(&self) -> bool {
        self.0.lock().draining
    }
}
