//! An engine without a model. To a router it behaves like an engine: a paged prefix cache of limited size, chunked
//! prefill with decode, a limit on running requests, a queue, and the HTTP contract of this project, SGLang or
//! vLLM. It can produce the faults of engines on request.
//!
//! Answers are a function of prompt, position and seed, the same on every worker.

#![forbid(unsafe_code)]

pub mod answer;
pub mod body;
pub mod cache;
pub mod client;
pub mod engine;
pub mod fault;
pub mod lockstep;
pub mod port;
pub mod query;
pub mod raw;
pub mod server;
pub mod settings;
pub mod socket;
pub mod state;
pub mod tokens;
pub mod worker;

pub use engine::{Stats, Totals};
pub use fault::{Fault, Garbage, Kind};
pub use lockstep::Lockstep;
pub use port::{Listener, Port};
pub use settings::{Flavour, Settings};
pub use worker::MockWorker;
