//! A cache-aware HTTP router for LLM workers.
//!
//! The map, in the order of a request's life:
//!
//! - [`key`] scans a request body, borrowed, into the block hashes of its prompt.
//! - [`tree`] remembers which worker has seen which blocks.
//! - [`policy`] chooses a worker: a pure function of the key and a snapshot of the workers.
//!
//! The library knows nothing of Python; `router/bindings` wraps it.

#![forbid(unsafe_code)]

pub mod key;
pub mod policy;
pub mod tree;
pub mod worker_id;
