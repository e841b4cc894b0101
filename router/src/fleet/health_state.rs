//! The health of a worker: its phase, and the notifications for a failed or lost worker.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use serde::Serialize;
use tokio::sync::Notify;

use crate::{cores::PerCore, metrics::labels};

labels! {
    /// The phase of a worker. Only a healthy worker is in rotation.
    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    #[repr(u8)]
    pub enum Phase {
        /// Registered, without a good health check so far.
        Starting => "starting",
        /// In rotation.
        Healthy => "healthy",
        /// A request or a health check has failed: out of rotation until the next good check.
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

/// The health of one worker, as its requests and its health check share it.
#[derive(Debug)]
pub struct HealthState {
    phase: AtomicU8,
    /// Whether the worker is dead or frozen: a first byte will not come.
    lost: AtomicBool,
    /// Notified when `lost` becomes true. Each request on the worker writes it, and the entries of its neighbours in the
    /// list: so each thread has its own, and the phase stays in the caches of all.
    gone: PerCore<Notify>,
    /// Notified when a health check is due now.
    probe: Notify,
}

impl HealthState {
    pub(super) fn new() -> Self {
        Self {
            phase: AtomicU8::new(Phase::Starting as u8),
            lost: AtomicBool::new(false),
            gone: PerCore::default(),
            probe: Notify::new(),
        }
    }

    pub fn phase(&self) -> Phase {
        Phase::from_u8(self.phase.load(Ordering::Acquire))
    }

    pub(super) fn set_phase(&self, phase: Phase) {
        if phase == Phase::Healthy {
            self.lost.store(false, Ordering::SeqCst);
        }
        self.phase.store(phase as u8, Ordering::Release);
    }

    /// Takes the worker out of rotation until the next good health check. Returns false if it was out already.
    pub(super) fn suspect(&self) -> bool {
        let (from, to) = (Phase::Healthy as u8, Phase::Suspect as u8);
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Requests a health check now.
    pub fn probe_now(&self) {
        self.probe.notify_one();
    }

    /// Resolves when a check has been requested since the last call.
    pub async fn probe_requested(&self) {
        self.probe.notified().await;
    }

    /// Marks the worker as lost: it is dead or frozen. Wakes the requests that wait for a first byte.
    pub(super) fn mark_lost(&self) {
        self.lost.store(true, Ordering::SeqCst);
        self.gone.iter().for_each(Notify::notify_waiters);
    }

    /// Whether the worker has been found dead or frozen.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    /// Resolves when the worker is lost; at once if it is lost already. Requests that wait for a first byte then go to
    /// other workers. Streams that have started continue.
    pub async fn lost(&self) {
        // Made before the test: from now on it is woken, also by a notification before its first poll.
        let gone = self.gone.own().notified();
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
    fn only_the_first_failure_takes_a_worker_out() {
        let state = HealthState::new();
        assert!(!state.suspect(), "it was not in");
        state.set_phase(Phase::Healthy);
        assert!(state.suspect());
        assert!(!state.suspect());
        assert_eq!(state.phase(), Phase::Suspect);
        assert!(!resolved(&mut pin!(state.probe_requested())));
        state.probe_now();
        state.probe_now();
        assert!(resolved(&mut pin!(state.probe_requested())));
        assert!(
            !resolved(&mut pin!(state.probe_requested())),
            "one check answers several requests"
        );
    }

    #[test]
    fn waiters_learn_of_a_lost_worker_whenever_they_started() {
        let state = HealthState::new();
        state.set_phase(Phase::Healthy);
        let mut early = pin!(state.lost());
        assert!(!resolved(&mut early));
        state.mark_lost();
        let mut late = pin!(state.lost());
        state.set_phase(Phase::Healthy);
        // The worker has come back meanwhile, but the awaited response is gone.
        assert!(resolved(&mut early));
        assert!(!resolved(&mut late));
        assert!(!resolved(&mut pin!(state.lost())));
    }
}
