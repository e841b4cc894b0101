//! The two background tasks of a backend: its health check, and the check of its engine.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::{Instant, sleep, sleep_until};

use super::Router;
use crate::fleet::{Backend, engine_check::EngineCheck, health::HealthCheck};

/// Shortest time between two health checks. Many requests may ask for one at the same time.
const MIN_PERIOD: Duration = Duration::from_millis(100);

/// Engine checks in a period of health checks.
const ENGINE_CHECKS: u32 = 2;

/// Checks the health of `backend` until the router is dropped, or the backend is removed and has finished its requests:
/// until then, these requests need to know if it dies.
pub(super) async fn health(router: Weak<Router>, backend: Arc<Backend>) {
    let mut check = {
        let Some(router) = router.upgrade() else { return };
        HealthCheck::new(Arc::clone(&backend), &router.config)
    };
    loop {
        let began = Instant::now();
        let period = {
            let Some(router) = router.upgrade() else {
                return;
            };
            check.tick(&router.config, &router.registry, &router.tree).await;
            router.config.health_check_interval_secs.get()
        };
        // Slightly early and with jitter, so that several routers do not check one worker in step. Period and timeout
        // together stay within two seconds.
        let next = began + period.mul_f64(0.9 + 0.1 * fastrand::f64());
        tokio::select! {
            () = sleep_until(next) => {}
            () = backend.health.probe_requested() => sleep_until(next.min(began + MIN_PERIOD)).await,
        }
        if backend.is_removed() && backend.requests() == 0 {
            return;
        }
    }
}

/// Checks the engine of `backend` until the router is dropped or the backend is removed.
pub(super) async fn engine(router: Weak<Router>, backend: Arc<Backend>) {
    let mut check = EngineCheck::new(Arc::clone(&backend));
    loop {
        let Some(period) =
            router.upgrade().map(|router| router.config.health_check_interval_secs.get())
        else {
            return;
        };
        sleep(period / ENGINE_CHECKS).await;
        if backend.is_removed() {
            return;
        }
        let Some(router) = router.upgrade() else { return };
        check.tick(&router.registry).await;
    }
}
