//! Whether a worker is in rotation, and the two bells that ring when it should not be.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use serde::Serialize;
use tokio::sync::Notify;

use crate::metrics::labels;

labels! {
    /// Whether a worker may be chosen, and what it takes to change that.
    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    #[repr(u8)]
    pub enum Phase {
        /// Registered and not yet seen healthy.
        Starting => "starting",
        /// In rotation.
        Healthy => "healthy",
        /// A request or a health check has failed on it: out of rotation until the next good check.
        Suspect => "suspect",
        /// Health checks keep failing.
        Down => "down",
    }
}

impl Phase {
    fn from_u8(value: u8) -> Self {
        [Self::Starting, Self::Healthy, Self::Suspect, Self::Down][usize::from(value)]
    }
}

/// A worker's place in the rotation.
#[derive(Debug)]
pub(super) struct Rotation {
    phase: AtomicU8,
    /// Dead or frozen: what waits for its first byte has nothing to wait for.
    lost: AtomicBool,
    /// Rings when `lost` becomes true.
    gone: Notify,
    /// Rings when a request has failed: the next health check is due now.
    doubt: Notify,
}

impl Rotation {
    pub(super) fn new() -> Self {
        Self {
            phase: AtomicU8::new(Phase::Starting as u8),
            lost: AtomicBool::new(false),
            gone: Notify::new(),
            doubt: Notify::new(),
        }
    }

    pub(super) fn phase(&self) -> Phase {
        Phase::from_u8(self.phase.load(Ordering::Acquire))
    }

    pub(super) fn set_phase(&self, phase: Phase) {
        if phase == Phase::Healthy {
            self.lost.store(false, Ordering::SeqCst);
        }
        self.phase.store(phase as u8, Ordering::Release);
    }

    /// Out of rotation until the next good health check. False if it was out already.
    pub(super) fn suspect(&self) -> bool {
        let (from, to) = (Phase::Healthy as u8, Phase::Suspect as u8);
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The next health check is due now.
    pub(super) fn doubt(&self) {
        self.doubt.notify_one();
    }

    /// Resolves when somebody has doubted the worker since the last call.
    pub(super) async fn doubted(&self) {
        self.doubt.notified().await;
    }

    /// Sends away who waits for a first byte.
    pub(super) fn give_up(&self) {
        self.lost.store(true, Ordering::SeqCst);
        self.gone.notify_waiters();
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    pub(super) async fn lost(&self) {
        let gone = self.gone.notified();
        tokio::pin!(gone);
        // Listen before looking, or a bell that rings in between is not heard.
        gone.as_mut().enable();
        if !self.lost.load(Ordering::SeqCst) {
            gone.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::Future, pin::pin, task::Poll};

    use super::*;

    fn resolved<F: Future>(future: &mut std::pin::Pin<&mut F>) -> bool {
        let mut nobody = std::task::Context::from_waker(std::task::Waker::noop());
        matches!(future.as_mut().poll(&mut nobody), Poll::Ready(_))
    }

    #[test]
    fn only_the_first_doubt_takes_a_worker_out() {
        let rotation = Rotation::new();
        assert!(!rotation.suspect(), "it was not in");
        rotation.set_phase(Phase::Healthy);
        assert!(rotation.suspect());
        assert!(!rotation.suspect());
        assert_eq!(rotation.phase(), Phase::Suspect);
        assert!(!resolved(&mut pin!(rotation.doubted())));
        rotation.doubt();
        rotation.doubt();
        assert!(resolved(&mut pin!(rotation.doubted())));
        assert!(!resolved(&mut pin!(rotation.doubted())), "one check answers several doubts");
    }

    #[test]
    fn who_waits_for_a_lost_worker_is_told_whenever_they_began() {
        let rotation = Rotation::new();
        rotation.set_phase(Phase::Healthy);
        let mut early = pin!(rotation.lost());
        assert!(!resolved(&mut early));
        rotation.give_up();
        let mut late = pin!(rotation.lost());
        rotation.set_phase(Phase::Healthy);
        // It has come back meanwhile, but what this one was waiting for is gone.
        assert!(resolved(&mut early));
        assert!(!resolved(&mut late));
        assert!(!resolved(&mut pin!(rotation.lost())));
    }
}
