//! When a worker's engine is checked.

use std::sync::{Arc, Weak};

use tokio::time::sleep;

use super::Router;
use crate::fleet::{engine_check::EngineCheck, worker::Worker};

/// Ticks of it in a period of health checks.
const TICKS: u32 = 2;

/// Checks until the router is gone or the worker removed.
pub(super) async fn run(router: Weak<Router>, worker: Arc<Worker>) {
    let mut check = EngineCheck::new(Arc::clone(&worker));
    loop {
        let Some(period) =
            router.upgrade().map(|router| router.config.health_check_interval_secs.get())
        else {
            return;
        };
        sleep(period / TICKS).await;
        if worker.is_removed() {
            return;
        }
        let Some(router) = router.upgrade() else { return };
        check.tick(&router.registry).await;
    }
}
