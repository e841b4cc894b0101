//! A snapshot of the statistics, for the dashboard and for programs that embed the router.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    engine::EngineLoad,
    fleet::{Replica, WorkerView},
    metrics::{Counters, Histogram, Label, Process, StatusClass},
    router::Router,
};

/// The snapshot. Counts start with the router; the difference of two snapshots gives a rate.
#[derive(Clone, Debug, Serialize)]
pub struct Stats {
    pub version: &'static str,
    pub uptime_s: f64,
    pub policy: &'static str,
    pub draining: bool,
    pub requests: RequestStats,
    pub tokens: TokenStats,
    /// Time from the last byte of a request to the first byte of its response body.
    pub first_byte: Latency,
    /// Time from the last byte of a request to the end of its response.
    pub duration: Latency,
    pub tree: TreeSize,
    pub process: ProcessStats,
    pub workers: Vec<WorkerStats>,
}

/// Data-plane requests.
#[derive(Clone, Debug, Serialize)]
pub struct RequestStats {
    pub in_flight: usize,
    /// Requests among these that wait for a worker.
    pub waiting: usize,
    /// Responses by status class: `2xx` and so on.
    pub answered: BTreeMap<&'static str, u64>,
    pub client_aborts: u64,
    pub retries: u64,
    pub upstream_errors: u64,
}

/// Prompt tokens of the requests with a report of cached tokens.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct TokenStats {
    pub prompt: u64,
    /// Tokens that the router predicted to be cached.
    pub predicted: u64,
    pub cached: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    pub count: u64,
    pub sum_s: f64,
    /// Pairs of upper bound in seconds and cumulative count, only where the count changes.
    pub buckets: Vec<(f64, u64)>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct TreeSize {
    pub blocks: u64,
    /// Blocks, counted once for each worker that owns them.
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
    /// Requests sent to the worker, by the reason of the policy.
    pub selections: BTreeMap<&'static str, u64>,
    pub tokens: TokenStats,
    pub tree_blocks: u64,
    pub ejections: u64,
    pub engine: EngineLoad,
}

impl Router {
    pub fn stats(&self) -> Stats {
        let workers: Vec<_> =
            self.registry.replicas().iter().map(|replica| self.worker_stats(replica)).collect();
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

    fn worker_stats(&self, replica: &Replica) -> WorkerStats {
        let counters = &replica.counters;
        WorkerStats {
            view: replica.view(),
            selections: by_name(&counters.selections),
            tokens: TokenStats {
                prompt: counters.prompt_tokens.total(),
                predicted: counters.predicted_tokens.total(),
                cached: counters.cached_tokens.total(),
            },
            tree_blocks: self.tree.owned_by(replica.id),
            ejections: replica.backend.counters.ejections.total(),
            engine: (*replica.engine_load()).clone(),
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
