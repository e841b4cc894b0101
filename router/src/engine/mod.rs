//! The formats of engines: the paths, header fields, JSON bodies and events that the router reads from a worker, or
//! adds for it.
//!
//! Everything here is a pure function of bytes. The router knows three engines ([`Runtime`]) and treats any other
//! server of OpenAI's API as an engine that reports nothing:
//!
//! | | this project | SGLang | vLLM |
//! |---|---|---|---|
//! | identity of the process | `boot_id` ([`info`]) | - | - |
//! | size of the KV cache | `/get_server_info` ([`info`]) | the same | `/metrics` ([`vllm`]) |
//! | progress of the scheduler | health body ([`health`]) | `/health_generate` | counts of `/metrics` ([`load`]) |
//! | cached tokens | `x-mla-*` with the first byte | `usage` ([`usage`]), asked for ([`include_usage`]) | as SGLang |
//! | continuation of a broken stream | [`continuation`], [`transcript`] | - | - |
//!
//! [`expect`] judges the start of a response and [`last_event`] the end of a stream.

pub mod continuation;
pub(crate) mod expect;
pub(crate) mod health;
pub(crate) mod include_usage;
mod info;
pub(crate) mod json_field;
pub(crate) mod last_event;
mod load;
pub(crate) mod transcript;
pub(crate) mod usage;
mod vllm;

use http::HeaderName;

pub use info::{Runtime, WorkerInfo};
pub use load::EngineLoad;

/// Response header of this project's workers, sent when the prompt is computed: number of prompt tokens.
pub const PROMPT_TOKENS: HeaderName = HeaderName::from_static("x-mla-prompt-tokens");

/// Response header, sent with [`PROMPT_TOKENS`]: number of prompt tokens that were cached.
pub const CACHED_TOKENS: HeaderName = HeaderName::from_static("x-mla-cached-tokens");

/// Response header: number of requests on the worker, of all routers together.
pub const REQUESTS: HeaderName = HeaderName::from_static("x-mla-requests");
