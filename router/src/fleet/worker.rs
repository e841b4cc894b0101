//! One worker as the router sees it: its address, its health, the load booked on it, its connections.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
};

use arc_swap::ArcSwap;
use serde::{Deserialize, Serialize};
use tokio::task::AbortHandle;

use crate::{
    fleet::{worker_id::WorkerId, worker_url::WorkerUrl},
    policy::{Candidate, Reason},
    upstream::Pool,
};

/// Whether a worker may be chosen, and what it takes to change that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Phase {
    /// Registered and not yet seen healthy.
    Starting,
    /// In rotation.
    Healthy,
    /// A request could not connect or was reset: out of rotation until the next good health check.
    /// Its tree share is kept, for it may be the same process.
    Suspect,
    /// Health checks fail. Its tree share is gone.
    Down,
}

impl Phase {
    fn from_u8(value: u8) -> Self {
        [Self::Starting, Self::Healthy, Self::Suspect, Self::Down][usize::from(value)]
    }
}

/// What `/get_server_info` says that the router uses. Every field is optional: other engines lack some.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct WorkerInfo {
    /// Random per process start: another one means an empty prefix cache.
    pub boot_id: Option<String>,
    /// Size of the worker's KV cache, and so of its share of the tree.
    pub max_total_num_tokens: Option<u64>,
}

impl WorkerInfo {
    /// What cannot be read counts as not said.
    pub fn parse(body: &[u8]) -> Self {
        serde_json::from_slice(body).unwrap_or_default()
    }
}

/// Work booked on a worker. On a cache line of its own: every request writes it, from any thread.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Load {
    requests: AtomicU32,
    pending_tokens: AtomicU64,
}

/// Shared by the registry, the requests it serves and its health check.
#[derive(Debug)]
pub struct Worker {
    pub id: WorkerId,
    pub url: WorkerUrl,
    pub pool: Arc<Pool>,
    pub info: ArcSwap<WorkerInfo>,
    /// Requests sent here, by the reason of the policy.
    pub selections: [AtomicU64; Reason::ALL.len()],
    hash_seed: u64,
    load: Load,
    phase: AtomicU8,
    /// Set once, before its tree share is dropped for good: an insert that comes later sees it.
    removed: AtomicBool,
    health_check: OnceLock<AbortHandle>,
}

impl Worker {
    pub fn new(id: WorkerId, url: WorkerUrl, pool: Pool) -> Self {
        Self {
            id,
            hash_seed: url.hash_seed(),
            url,
            pool: Arc::new(pool),
            info: ArcSwap::default(),
            selections: Default::default(),
            load: Load::default(),
            phase: AtomicU8::new(Phase::Starting as u8),
            removed: AtomicBool::new(false),
            health_check: OnceLock::new(),
        }
    }

    pub fn phase(&self) -> Phase {
        Phase::from_u8(self.phase.load(Ordering::Acquire))
    }

    /// Returns the phase before.
    pub fn set_phase(&self, phase: Phase) -> Phase {
        Phase::from_u8(self.phase.swap(phase as u8, Ordering::AcqRel))
    }

    /// Takes the worker out of rotation until its next good health check. False if it was out already.
    pub fn suspect(&self) -> bool {
        let (from, to) = (Phase::Healthy as u8, Phase::Suspect as u8);
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::SeqCst)
    }

    /// Its health check ends with it.
    pub fn attach_health_check(&self, task: AbortHandle) {
        self.health_check.set(task).expect("contract: one health check per worker");
    }

    /// Out of the registry for good. Requests in flight finish on the connections they hold.
    pub fn retire(&self) {
        self.removed.store(true, Ordering::SeqCst);
        if let Some(task) = self.health_check.get() {
            task.abort();
        }
        self.pool.clear();
    }

    pub fn requests(&self) -> u32 {
        self.load.requests.load(Ordering::Relaxed)
    }

    pub fn pending_tokens(&self) -> u64 {
        self.load.pending_tokens.load(Ordering::Relaxed)
    }

    pub fn candidate(&self, matched_blocks: u32) -> Candidate {
        Candidate {
            id: self.id,
            requests: self.requests(),
            pending_tokens: self.pending_tokens(),
            matched_blocks,
            hash_seed: self.hash_seed,
        }
    }

    /// Books a request and the prompt tokens that the worker has yet to compute for it.
    pub fn book(self: &Arc<Self>, pending_tokens: u64) -> Booking {
        self.load.requests.fetch_add(1, Ordering::Relaxed);
        self.load.pending_tokens.fetch_add(pending_tokens, Ordering::Relaxed);
        Booking { worker: Arc::clone(self), pending_tokens }
    }

    pub fn view(&self) -> WorkerView {
        let info = self.info.load();
        WorkerView {
            id: self.id.0,
            url: self.url.to_string(),
            phase: self.phase(),
            healthy: self.phase() == Phase::Healthy,
            requests: self.requests(),
            pending_tokens: self.pending_tokens(),
            boot_id: info.boot_id.clone(),
            max_total_num_tokens: info.max_total_num_tokens,
        }
    }
}

/// The share of one request in its worker's load. Released by dropping it, on whatever path the
/// request ends, so the counters cannot drift.
#[derive(Debug)]
pub struct Booking {
    worker: Arc<Worker>,
    pending_tokens: u64,
}

impl Booking {
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// The first byte is out, so the prompt is computed: its tokens no longer stand in the way.
    pub fn prefill_done(&mut self) {
        let tokens = std::mem::take(&mut self.pending_tokens);
        self.worker.load.pending_tokens.fetch_sub(tokens, Ordering::Relaxed);
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.prefill_done();
        self.worker.load.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A worker as `/workers` and the Python bindings show it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerView {
    pub id: u32,
    pub url: String,
    pub phase: Phase,
    pub healthy: bool,
    pub requests: u32,
    pub pending_tokens: u64,
    pub boot_id: Option<String>,
    pub max_total_num_tokens: Option<u64>,
}
