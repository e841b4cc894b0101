//! Whose turn it is on a connection: what its stream, its service and the request in it share.

use std::{
    future::poll_fn,
    mem,
    sync::Arc,
    task::{Poll, Waker},
};

use parking_lot::Mutex;

use crate::error::Error;

/// They all run in the task of the connection, so that none ever waits for the lock.
#[derive(Clone, Debug, Default)]
pub struct Turn(Arc<Mutex<State>>);

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
    resting: bool,
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
        state.refusal = refusal;
    }

    pub(super) fn is_used(&self) -> bool {
        self.0.lock().used
    }

    /// What speaks against the request that hyper has just handed over.
    pub(super) fn take_refusal(&self) -> Option<Error> {
        self.0.lock().refusal.take()
    }

    /// The request's body has arrived whole.
    pub fn uploaded(&self) {
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
        state.answering = false;
        if let Some(next) = state.next.take() {
            next.wake();
        }
    }

    /// The client has been idle for a while.
    pub(super) fn rest(&self) {
        self.0.lock().resting = true;
    }

    /// Ready after [`Turn::rest`], once. Not woken by it: both happen in one poll of their task.
    pub(super) async fn rests(&self) {
        let is_resting = || mem::take(&mut self.0.lock().resting);
        poll_fn(|_| if is_resting() { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    /// Uploads are no longer waited for.
    pub(super) fn drain(&self) {
        self.0.lock().draining = true;
    }

    pub(super) fn is_draining(&self) -> bool {
        self.0.lock().draining
    }
}
