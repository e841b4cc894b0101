//! Connections to workers: their allowed addresses, how they are opened, and one request over one of them.
//!
//! With HTTP/1.1, the default, each worker has a pool of idle connections, and the task that waits for a response
//! does the I/O of its connection ([`http1`]). With `--upstream-http2` all requests to a worker share one connection
//! ([`http2`]).

pub mod address;
pub mod call;
mod connection;
mod dial;
mod http1;
mod http2;
mod pool;
mod request;
mod response;

use std::{io, time::Duration};

use thiserror::Error;

pub use connection::Connection;
pub use dial::Dialer;
pub use pool::Pool;
pub use request::OutgoingRequest;

/// Why there is no complete response.
#[derive(Debug, Error)]
pub enum UpstreamError {
    #[error("cannot connect: {0}")]
    Connect(#[from] io::Error),
    #[error("no connection within {0:?}")]
    ConnectTimeout(Duration),
    #[error("connection lost before the response: {0}")]
    Reset(#[source] io::Error),
    #[error("connection lost in the response: {0}")]
    Cut(#[source] io::Error),
    #[error("a response of more than {0} bytes")]
    TooLarge(usize),
}

impl UpstreamError {
    /// Whether the router itself lacks a resource: then the error says nothing about the worker.
    pub fn is_local(&self) -> bool {
        let Self::Connect(error) = self else { return false };
        matches!(error.kind(), io::ErrorKind::AddrNotAvailable | io::ErrorKind::OutOfMemory)
            || self.is_out_of_files()
    }

    pub(super) fn is_out_of_files(&self) -> bool {
        /// `EMFILE` (process) and `ENFILE` (system).
        const TOO_MANY_FILES: [i32; 2] = [24, 23];
        let Self::Connect(error) = self else { return false };
        error.raw_os_error().is_some_and(|code| TOO_MANY_FILES.contains(&code))
    }
}
