//! What the router knows, in one piece: for the dashboard and for the program it is a part of.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    fleet::{
        engine_load::EngineLoad,
        worker::{Worker, WorkerView},
    },
    metrics::{Counters, Histogram, Label, Process, StatusClass},
    router::Router,
};

/// Counts go up from the start of the router; whoever wants a rate takes two of these.
#[derive(Clone, Debug, Serialize)]
pub struct Stats {
    pub version: &'static str,
    pub uptime_s: f64,
    pub policy: &'static str,
    pub draining: bool,
    pub requests: RequestStats,
    pub tokens: TokenStats,
    /// From the last byte of a request to the first byte of its response's body.
    pub first_byte: Latency,
    /// From the last byte of a request to the end of its response.
    pub duration: Latency,
    pub tree: TreeSize,
    pub process: ProcessStats,
    pub workers: Vec<WorkerStats>,
}

/// Requests of the data plane.
#[derive(Clone, Debug, Serialize)]
pub struct RequestStats {
    pub in_flight: usize,
    /// Of these, those that no worker can take now.
    pub waiting: usize,
    /// Answered, by class of status: `2xx` and so on.
    pub answered: BTreeMap<&'static str, u64>,
    pub client_aborts: u64,
    pub retries: u64,
    pub upstream_errors: u64,
}

/// Of the requests for which a worker has said what was cached.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct TokenStats {
    pub prompt: u64,
    /// What the router took for cached.
    pub predicted: u64,
    pub cached: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    pub count: u64,
    pub sum_s: f64,
    /// Upper bound in seconds, and how many took at most so long. Only where that changes.
    pub buckets: Vec<(f64, u64)>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct TreeSize {
    pub blocks: u64,
    /// Blocks, counted once for each worker that holds them.
    pub held: u64,
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct ProcessStats {
    pub cpu_s: f64,
    pub resident_bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct WorkerStats {
    #[serde(flatten)]
    pub view: WorkerView,
    /// Requests sent to it, by the policy's reason.
    pub selections: BTreeMap<&'static str, u64>,
    pub tokens: TokenStats,
    pub tree_blocks: u64,
    pub ejections: u64,
    pub engine: EngineLoad,
}

impl Router {
    pub fn stats(&self) -> Stats {
        let workers: Vec<_> =
            self.registry.workers().iter().map(|worker| self.worker_stats(worker)).collect();
        let classes = StatusClass::ALL.iter();
        let tree = self.tree.stats();
        Stats {
            version: env!("CARGO_PKG_VERSION"),
            uptime_s: self.started.elapsed().as_secs_f64(),
            policy: self.policy.name(),
            draining: self.gate.is_draining(),
            requests: RequestStats {
                in_flight: self.gate.in_flight(),
                waiting: self.queue.waiting(),
                answered: classes
                    .map(|class| (class.as_str(), self.metrics.requests.served(*class)))
                    .collect(),
                client_aborts: self.metrics.client_aborts.get(),
                retries: self.metrics.retries.total(),
                upstream_errors: self.metrics.upstream_errors.total(),
            },
            tokens: workers.iter().map(|worker| worker.tokens).sum(),
            first_byte: Latency::of(&self.metrics.first_byte),
            duration: Latency::of(&self.metrics.duration),
            tree: TreeSize { blocks: tree.blocks, held: tree.held, bytes: tree.bytes },
            process: Process::read().map_or_else(
                |_| ProcessStats::default(),
                |process| ProcessStats {
                    cpu_s: process.cpu_s,
                    resident_bytes: process.resident_bytes,
                },
            ),
            workers,
        }
    }

    fn worker_stats(&self, worker: &Worker) -> WorkerStats {
        let counters = &worker.counters;
        WorkerStats {
            view: worker.view(),
            selections: by_name(&counters.selections),
            tokens: TokenStats {
                prompt: counters.prompt_tokens.total(),
                predicted: counters.predicted_tokens.total(),
                cached: counters.cached_tokens.total(),
            },
            tree_blocks: self.tree.held_by(worker.id),
            ejections: counters.ejections.total(),
            engine: (**worker.engine_load.load()).clone(),
        }
    }
}

fn by_name<L: Label>(counters: &Counters<L>) -> BTreeMap<&'static str, u64> {
    counters.iter().map(|(label, count)| (label.as_str(), count)).collect()
}

impl std::iter::Sum for TokenStats {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            prompt: sum.prompt + one.prompt,
            predicted: sum.predicted + one.predicted,
            cached: sum.cached + one.cached,
        })
    }
}

impl Latency {
    fn of(histogram: &Histogram) -> Self {
        let mut buckets: Vec<_> = histogram.cumulative().collect();
        buckets.dedup_by_key(|(_, count)| *count);
        Self { count: histogram.count(), sum_s: histogram.sum().as_secs_f64(), buckets }
    }
}
