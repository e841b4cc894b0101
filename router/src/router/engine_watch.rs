//! When a worker's engine is asked what it is doing.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::{Instant, sleep, timeout};

use super::Router;
use crate::{
    fleet::{
        engine_load::EngineLoad,
        worker::{Phase, Worker},
    },
    upstream::{Connection, call::Call},
};

/// An engine that takes longer has no time for figures.
const PATIENCE: Duration = Duration::from_secs(5);

/// Health checks from question to question,
const OFTEN: u32 = 2;

/// and where the engine has no such page: the next process may have one.
const SELDOM: u32 = 60;

/// Asks until the router is gone or the worker removed, half as often as its health is checked. Over a
/// connection of its own, and nothing waits for the answer: it is for people to see, and a
/// sign of life where counts of tokens go up.
pub(super) async fn run(router: Weak<Router>, worker: Arc<Worker>) {
    let mut connection = None;
    let mut pause = OFTEN;
    loop {
        let Some(period) =
            router.upgrade().map(|router| router.config.health_check_interval_secs.get())
        else {
            return;
        };
        sleep(period * pause).await;
        if worker.is_removed() {
            return;
        }
        let mut load = EngineLoad::default();
        pause = OFTEN;
        if worker.phase() == Phase::Healthy {
            match ask(&worker, &mut connection).await {
                Some(told) if told.is_empty() => pause = SELDOM,
                told => load = told.unwrap_or_default(),
            }
        }
        if load.is_ahead_of(&worker.engine_load.load()) {
            // Also while no byte of a response comes: it is busy with answers in one piece.
            worker.heard(Instant::now());
        }
        worker.engine_load.store(Arc::new(load));
    }
}

/// `None` if the engine did not answer in time; empty if it has no figures.
async fn ask(worker: &Worker, connection: &mut Option<Connection>) -> Option<EngineLoad> {
    let call = Call::get("/metrics");
    match timeout(PATIENCE, call.over(connection, &worker.pool)).await {
        Ok(Ok((status, page))) if status.is_success() => Some(EngineLoad::parse(&page)),
        Ok(Ok(_)) => Some(EngineLoad::default()),
        Ok(Err(_)) | Err(_) => None,
    }
}
