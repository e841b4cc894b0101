//! When a worker's health is checked.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

use super::Router;
use crate::fleet::{health::HealthCheck, worker::Worker};

/// Many requests may doubt a worker at one time, and again and again.
const LEAST_PERIOD: Duration = Duration::from_millis(100);

/// Checks `worker` until the router is gone, or it is removed and has finished what it was serving:
/// until then, who waits for it wants to know if it dies.
pub(super) async fn run(router: Weak<Router>, worker: Arc<Worker>) {
    let mut check = {
        let Some(router) = router.upgrade() else { return };
        HealthCheck::new(Arc::clone(&worker), &router.config)
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
        // A little early, each at its own time: many routers must not ask one worker in step, and
        // period and timeout together stay within two seconds.
        let next = began + period.mul_f64(0.9 + 0.1 * fastrand::f64());
        tokio::select! {
            () = sleep_until(next) => {}
            () = worker.doubted() => sleep_until(next.min(began + LEAST_PERIOD)).await,
        }
        if worker.is_removed() && worker.requests() == 0 {
            return;
        }
    }
}
