//! One KV cache and its queue in an engine process, with its load and learned state. The process has one for each
//! data-parallel rank.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use http::{HeaderName, HeaderValue};
use serde::Serialize;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use super::{
    backend::Backend, breaker::BreakerState, counters::ReplicaCounters, health_state::Phase,
    last_failure::LastFailure, load::Load, other_routers::OtherRouters,
    single_flight::SingleFlight,
};
use crate::{
    config::Config,
    correct::LearnedCache,
    engine::{EngineLoad, Runtime},
    names::WorkerId,
    policy::Candidate,
};

/// The request header by which SGLang and vLLM take the rank.
pub const RANK_HEADER: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// A worker as the policies and the tree see it.
#[derive(Debug)]
pub struct Replica {
    pub id: WorkerId,
    pub backend: Arc<Backend>,
    /// Its data-parallel rank; `None` if the process chooses the rank itself, or has only one.
    pub rank: Option<u32>,
    /// The value of [`RANK_HEADER`] for a request to this replica.
    pub rank_header: Option<HeaderValue>,
    /// `URL` or `URL@RANK`.
    name: String,
    pub counters: ReplicaCounters,
    /// The learned state of its cache.
    pub learned: LearnedCache,
    /// Hash of the name. It is the same in every router, so all routers break ties the same way.
    hash_seed: u64,
    pub(super) load: Load,
    pub(super) other_routers: OtherRouters,
    pub(super) single_flight: SingleFlight,
    /// Set once, before its share of the tree is dropped: a later insert sees the flag.
    removed: AtomicBool,
}

impl Replica {
    pub fn new(id: WorkerId, backend: Arc<Backend>, rank: Option<u32>, config: &Config) -> Self {
        let url = &backend.url;
        let name = rank.map_or_else(|| url.to_string(), |rank| format!("{url}@{rank}"));
        Self {
            id,
            hash_seed: xxh3_64(name.as_bytes()),
            backend,
            rank,
            rank_header: rank.map(HeaderValue::from),
            name,
            counters: ReplicaCounters::default(),
            learned: LearnedCache::new(config.default_cache_blocks()),
            load: Load::default(),
            other_routers: OtherRouters::default(),
            single_flight: SingleFlight::default(),
            removed: AtomicBool::new(false),
        }
    }

    /// The name of the worker in metrics and logs.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The figures that the engine reports. They are those of the whole process, so only its first rank has them.
    pub fn engine_load(&self) -> Arc<EngineLoad> {
        match self.rank {
            None | Some(0) => self.backend.engine_load.load_full(),
            Some(_) => Arc::default(),
        }
    }

    pub fn requests(&self) -> u32 {
        self.load.requests()
    }

    pub fn pending_tokens(&self) -> u64 {
        self.load.pending_tokens()
    }

    /// Records the number of requests that the worker reports, of all routers together.
    pub fn record_reported_requests(&self, requests: u32) {
        self.other_routers.observe(requests, self.requests(), Instant::now());
    }

    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::SeqCst)
    }

    /// Marks the replica as removed from the registry.
    pub fn retire(&self) {
        self.removed.store(true, Ordering::SeqCst);
    }

    /// Returns the worker in the form for the policies.
    pub fn candidate(&self, matched_blocks: u32, now: Instant) -> Candidate {
        Candidate {
            id: self.id,
            requests: self.requests(),
            other_requests: self.other_routers.requests(now),
            pending_tokens: self.pending_tokens(),
            matched_blocks,
            hash_seed: self.hash_seed,
            token_seconds: self.backend.speed.token_seconds(),
        }
    }

    pub fn view(&self) -> WorkerView {
        let backend = &*self.backend;
        let info = backend.info.load();
        WorkerView {
            id: self.id.0,
            url: backend.url.to_string(),
            dp_rank: self.rank,
            phase: backend.phase(),
            healthy: backend.is_in_rotation(),
            is_healthy: backend.is_in_rotation(),
            breaker: backend.breaker(),
            trouble: backend.last_failure(),
            requests: self.requests(),
            pending_tokens: self.pending_tokens(),
            models: info.models.clone(),
            boot_id: info.boot_id.clone(),
            max_total_num_tokens: info.max_total_num_tokens,
            runtime: info.runtime,
            unreported_answers: self.counters.unreported.get(),
        }
    }
}

/// A worker as `/workers` and the Python bindings show it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerView {
    pub id: u32,
    pub url: String,
    /// Null if the router does not choose the data-parallel rank.
    pub dp_rank: Option<u32>,
    pub phase: Phase,
    pub healthy: bool,
    /// The same as `healthy`, under SMG's name.
    pub is_healthy: bool,
    pub breaker: BreakerState,
    /// The last failure. Null while the worker gets requests.
    pub trouble: Option<LastFailure>,
    pub requests: u32,
    pub pending_tokens: u64,
    pub models: Vec<String>,
    pub boot_id: Option<String>,
    pub max_total_num_tokens: Option<u64>,
    pub runtime: Option<Runtime>,
    /// Complete answers without a report of cached tokens.
    pub unreported_answers: u64,
}
