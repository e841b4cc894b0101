//! Takes one sample a second for the history, from the counters.

use std::{sync::Weak, time::Duration};

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::Router;
use crate::{
    fleet::Replica,
    history::{Counts, RouterFigures, WorkerFigures},
    metrics::{Label, StatusClass, UpstreamFailure},
};

const PERIOD: Duration = Duration::from_secs(1);

/// Samples until the router is gone.
pub(super) async fn run(router: Weak<Router>) {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        let Some(router) = router.upgrade() else {
            return;
        };
        let replicas = router.registry.replicas();
        let moments = replicas.iter().map(|replica| (replica.id, of_worker(replica)));
        router.history.record(Instant::now(), of_router(&router), moments);
    }
}

fn of_router(router: &Router) -> RouterFigures {
    let metrics = &router.metrics;
    let answered: u64 = StatusClass::ALL.iter().map(|class| metrics.requests.served(*class)).sum();
    // 429 and 503 of a busy worker do not count as errors.
    let tries =
        metrics.upstream_errors.total() - metrics.upstream_errors.get(UpstreamFailure::Busy);
    let errors = metrics.requests.served(StatusClass::ServerError) + tries;
    RouterFigures {
        counts: Counts {
            requests: Some(answered as f64),
            errors: Some(errors as f64),
            first_token: metrics.first_token.buckets(),
            ..Counts::default()
        },
        in_flight: router.gate.in_flight() as f64,
        waiting: router.queue.waiting() as f64,
    }
}

fn of_worker(replica: &Replica) -> WorkerFigures {
    let (counters, load) = (&replica.counters, replica.engine_load());
    WorkerFigures {
        counts: Counts {
            requests: Some(counters.selections.total() as f64),
            errors: None,
            prompt_tokens: load.prompt_tokens,
            output_tokens: load.output_tokens,
            reported: Some(counters.prompt_tokens.total() as f64),
            cached: Some(counters.cached_tokens.total() as f64),
            predicted: Some(counters.predicted_tokens.total() as f64),
            pauses_s: load.pauses_s,
            pauses: load.pauses,
            first_token: counters.first_token.buckets(),
        },
        running: load.running,
        waiting: load.waiting,
        kv_usage: load.kv_usage,
    }
}
