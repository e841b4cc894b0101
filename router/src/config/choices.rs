//! Settings with a fixed set of values.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The order of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueuePolicy {
    /// First come, first served
    Fcfs,
    /// The clients take turns, and none fills more than half of the queue; a client is an API key, or
    /// an address where no --api-key is set
    Fair,
}

/// The names of the policies. `policy::of` creates them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    /// Least added waiting time; learns the prefix caches of the workers
    CacheAware,
    /// SGLang's rule: longest prefix match, unless it is short or the load is out of balance
    CacheAwareThreshold,
    /// Hash of the session: header x-mla-session, else the body's `user`
    #[value(alias = "consistent_hashing")]
    #[serde(alias = "consistent_hashing")]
    ConsistentHash,
    /// The worker with the fewest requests
    LeastLoad,
    /// The previous worker of the session: header x-mla-session, else the body's `user`
    Manual,
    /// The less loaded of two random workers
    PowerOfTwo,
    /// Hash of the prompt's first 256 tokens, within 5/4 of the mean load
    PrefixHash,
    /// A random worker
    Random,
    /// Each worker in turn
    RoundRobin,
}

impl PolicyName {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CacheAware => "cache_aware",
            Self::CacheAwareThreshold => "cache_aware_threshold",
            Self::ConsistentHash => "consistent_hash",
            Self::LeastLoad => "least_load",
            Self::Manual => "manual",
            Self::PowerOfTwo => "power_of_two",
            Self::PrefixHash => "prefix_hash",
            Self::Random => "random",
            Self::RoundRobin => "round_robin",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}
