//! An engine without a model. It behaves like one where a router can see it: a paged prefix cache of
//! limited size, chunked prefill beside decode, a limit of running requests and a queue, our HTTP
//! contract or that of SGLang and vLLM; and it can be told to fail in every way that engines do.
//!
//! Answers are a function of prompt, position and seed, the same on every worker.

#![forbid(unsafe_code)]

pub mod answer;
pub mod body;
pub mod cache;
pub mod client;
pub mod engine;
pub mod fault;
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
pub use port::{Listener, Port};
pub use settings::{Flavour, Settings};
pub use worker::MockWorker;
