//! A cache-aware HTTP router for LLM workers.
//!
//! The map, in the order of a request's life:
//!
//! - [`server`] accepts connections, [`framing`] watches their heads; [`endpoint`] says what a path means.
//! - [`proxy`] reads the [`mod@request`] and sees it through to a response.
//! - [`key`] scans the body, borrowed, into the block hashes of its prompt.
//! - [`select`] puts together what is known: [`registry`] and [`worker`] (who is there, how loaded),
//!   [`tree`] (who has seen which blocks), [`policy`] (a pure choice from both).
//! - [`upstream`] sends it over a pooled connection; [`body`] hands the response on, frame by frame.
//!
//! Beside it run one [`health`] check per worker and the routes of [`admin`]. [`config`] holds all
//! settings, [`error`] every refusal, [`handle`] is the router as a library.
//!
//! The library knows nothing of Python; `router/bindings` wraps it.

#![forbid(unsafe_code)]

pub mod admin;
pub mod body;
pub mod call;
pub mod cli;
pub mod config;
pub mod endpoint;
pub mod error;
pub mod framing;
pub mod handle;
pub mod headers;
pub mod health;
pub mod key;
pub mod metrics;
pub mod policy;
pub mod proxy;
pub mod registry;
pub mod request;
pub mod router;
pub mod select;
pub mod server;
pub mod shutdown;
pub mod tree;
pub mod upstream;
pub mod worker;
pub mod worker_id;
pub mod worker_url;

pub use config::Config;
pub use error::Error;
pub use handle::{RouterHandle, StartError};
