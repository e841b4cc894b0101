//! Why there is no router to answer at all.

use std::io;

use thiserror::Error;

/// Why a router did not start. One line, for people.
#[derive(Debug, Error)]
pub enum StartError {
    #[error("cannot listen on {host}:{port}: {source}")]
    Listen { host: String, port: u16, source: io::Error },
    #[error(
        "without a key, everybody who can reach {host} could use the workers: set --api-key (or \
         MLA_ROUTER_API_KEY), listen on 127.0.0.1, or say --insecure"
    )]
    Exposed { host: String },
    #[error("{0}")]
    Tls(String),
    #[error("{0}")]
    Discovery(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}
