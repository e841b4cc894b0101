//! The workers: registration, health checks, circuit breaker, load, and learned speeds and limits.
//!
//! A worker is a [`Replica`]: one KV cache and its queue. Its [`Backend`] is the engine process behind its URL.

mod backend;
mod breaker;
mod check_timeout;
mod counters;
pub mod engine_check;
mod evidence;
pub mod health;
mod health_state;
mod last_activity;
mod last_failure;
mod latency_limits;
mod load;
mod load_guard;
pub mod metrics;
pub mod other_routers;
pub mod registry;
mod replica;
mod silence_limit;
mod single_flight;
mod spec;
pub mod speed;

pub use backend::Backend;
pub use breaker::BreakerState;
pub use counters::{BackendCounters, ReplicaCounters};
pub use evidence::Outcome;
pub use health_state::Phase;
pub use last_failure::LastFailure;
pub use load_guard::LoadGuard;
pub use replica::{RANK_HEADER, Replica, WorkerView};
pub use spec::WorkerSpec;
