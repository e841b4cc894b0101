//! A cache-aware HTTP router for LLM workers.
//!
//! The modules in the order of a request:
//!
//! - [`server`] accepts connections and checks their heads.
//! - [`endpoint`] gives a path its meaning. [`key`] scans the body, without a copy, into the block hashes of its
//!   prompt.
//! - [`router::select`] chooses a worker from the state of the workers ([`fleet`]), their cached prefixes
//!   ([`tree`]) and the [`policy`], which is a pure function.
//! - [`proxy`] sends the request over a connection of [`upstream`], retries it on other workers, or lets it wait in
//!   the queue ([`admission`]), until a response has started.
//! - [`body`] passes the response on, frame by frame. Its report of cached tokens corrects the tree ([`correct`]).
//!
//! In the background run one health check for each worker and the sources of workers (`discovery`). [`admin`] has
//! the router's own endpoints. [`config`] holds all settings, [`error`] all errors, [`engine`] the formats of the
//! engines, [`telemetry`] the record of each request, [`history`] the samples of the last hour. [`handle`] is the
//! router as a library.
//!
//! Dependencies point one way. `tests/structure.rs` has the order of the modules, bottom first.
//!
//! The library does not depend on Python; `router/bindings` wraps it.

#![forbid(unsafe_code)]

pub mod admin;
pub mod admission;
pub mod body;
pub mod cli;
pub mod config;
pub mod cores;
pub mod correct;
pub mod deadline_timer;
mod discovery;
pub mod endpoint;
pub mod engine;
pub mod error;
mod file;
mod file_watch;
pub mod fleet;
pub mod handle;
mod heap;
pub mod history;
pub mod key;
mod log_lines;
pub mod metrics;
pub mod names;
pub mod policy;
pub mod proxy;
pub mod router;
pub mod server;
pub mod shutdown;
pub mod stats;
mod sync;
pub mod telemetry;
pub mod tree;
pub mod upstream;
pub mod wire;

pub use config::Config;
pub use error::{Error, StartError};
pub use handle::RouterHandle;
