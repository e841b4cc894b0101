//! The router over real sockets: fake workers behind it, real clients before it. One module per
//! promise, one binary for all of them, because linking is most of what a test costs.

mod abort;
mod admin;
mod auth;
mod backpressure;
mod breaker;
mod cli;
mod dashboard;
mod discovery;
mod drain;
mod events;
mod frozen;
mod garbage;
mod heads;
mod health;
mod journal;
mod kills;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod learning;
mod listening;
mod load;
mod metrics;
mod models;
mod overload;
mod partition;
mod pool;
mod prefix_waits;
mod queue;
mod refusals;
mod replay;
mod replay_responses;
mod retry;
mod sessions;
mod sites;
mod slow_readers;
mod sockets;
mod streaming;
mod support;
mod timeouts;
mod tls;
mod traces;
mod upstream_http2;
mod upstream_tls;
mod worker_urls;
