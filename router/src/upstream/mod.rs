//! Connections to workers: where they may go, how they come about, and one request over one of them.
//!
//! HTTP/1.1 by default: a pool of idle connections for each worker, and whoever waits for a response
//! does the IO of its connection ([`connection`]). With `--upstream-http2` all requests to a worker
//! share one connection.

pub mod address;
pub mod call;
mod connection;
mod dial;
mod pool;

use std::{io, time::Duration};

use thiserror::Error;

pub use connection::Connection;
pub use dial::Dialer;
pub use pool::Pool;

/// Why there is no response, or not all of it.
#[derive(Debug, Error)]
pub enum UpstreamError {
    #[error("cannot connect: {0}")]
    Connect(#[from] io::Error),
    #[error("no connection within {0:?}")]
    ConnectTimeout(Duration),
    #[error("connection lost before the response: {0}")]
    Reset(#[source] hyper::Error),
    #[error("connection lost in the response: {0}")]
    Cut(#[source] hyper::Error),
    #[error("a response of more than {0} bytes")]
    TooLarge(usize),
}

impl UpstreamError {
    /// The router itself has run out of something, which is no word against the worker.
    pub fn is_local(&self) -> bool {
        let Self::Connect(error) = self else { return false };
        matches!(error.kind(), io::ErrorKind::AddrNotAvailable | io::ErrorKind::OutOfMemory)
            || self.is_out_of_files()
    }

    pub(super) fn is_out_of_files(&self) -> bool {
        /// In the process or in the system (`EMFILE`, `ENFILE` on Unix).
        const TOO_MANY_FILES: [i32; 2] = [24, 23];
        let Self::Connect(error) = self else { return false };
        error.raw_os_error().is_some_and(|code| TOO_MANY_FILES.contains(&code))
    }
}
