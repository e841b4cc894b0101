//! One request until the beginning of its answer is there: read it, choose a worker, send, try again.
//!
//! A client that leaves drops the future (before the response) or the body (in it), and with it the
//! connection to the worker: nothing here has to notice.

mod attempt;
mod beginning;
mod exchange;
mod expect;
mod job;
mod obtain;
pub mod replay;
pub mod request;
pub mod rewrite;
mod waiting;

pub use job::Job;
pub use obtain::{Reply, Rest, obtain};
