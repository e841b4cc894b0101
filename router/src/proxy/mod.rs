//! One request until the start of its response: read it, choose a worker, send it, retry.
//!
//! If the client disconnects, the future of the request is dropped (before the response) or its body (after that),
//! and with it the connection to the worker. No code here has to detect the disconnect.

mod attempt;
mod attempt_error;
mod dispatch;
mod exchange;
mod job;
mod peek;
mod reply;
pub mod request;
mod waiting;

pub use dispatch::dispatch;
pub use job::Job;
pub use reply::Reply;
