//! A cache-aware HTTP router for LLM workers.
//!
//! The map, in the order of a request's life:
//!
//! - [`server`] accepts connections, watches their heads, and sees each request through to its response.
//! - [`endpoint`] says what a path means; [`key`] scans the body, borrowed, into the block hashes of its
//!   prompt.
//! - [`router::select`] puts together what is known: [`fleet`] (who is there, how loaded), [`tree`] (who
//!   has seen which blocks), [`policy`] (a pure choice from both).
//! - [`proxy`] sends it over a connection of [`upstream`], to another worker if need be, or has it wait
//!   as [`admission`] says, until the beginning of an answer is there.
//! - [`body`] hands the response on, frame by frame. What it says of the worker's cache goes into the
//!   tree by [`correct`].
//!
//! Beside it run one health check per worker, the sources of workers in `discovery` and the routes of
//! [`admin`]. [`config`] holds all settings, [`error`] every refusal, [`telemetry`] what is remembered of
//! a request, [`history`] what went on in the last hour, and [`handle`] is the router as a library.
//!
//! The modules use each other one way. `tests/structure.rs` has their order, from the ground up.
//!
//! The library knows nothing of Python; `router/bindings` wraps it.

#![forbid(unsafe_code)]

pub mod admin;
pub mod admission;
pub mod alarm;
pub mod body;
pub mod cli;
pub mod config;
pub mod cores;
pub mod correct;
mod discovery;
pub mod endpoint;
pub mod error;
pub mod fleet;
pub mod handle;
pub mod history;
pub mod key;
pub mod metrics;
pub mod names;
pub mod policy;
pub mod proxy;
pub mod router;
pub mod server;
mod settled;
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
