//! The data of one request from which its access log line and its trace are written.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use http::{HeaderValue, StatusCode};
use smallvec::SmallVec;

use crate::{endpoint::Endpoint, fleet::Replica, policy::Reason};

/// One request. The first four fields are known when it starts, the others are filled in while it runs.
#[derive(Debug)]
pub struct RequestRecord {
    pub request_id: HeaderValue,
    pub endpoint: Endpoint,
    pub client: SocketAddr,
    pub started: Instant,
    /// Status of the response; `None` if the client disconnected before the response started.
    pub status: Option<StatusCode>,
    /// Attempts in the order in which they were made.
    pub attempts: SmallVec<[Attempt; 1]>,
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    /// Time from the start of the request to the first byte of the response body.
    pub first_byte: Option<Duration>,
    /// Bytes of the response body.
    pub bytes: u64,
    pub end: End,
}

impl RequestRecord {
    pub(super) fn new(request_id: HeaderValue, endpoint: Endpoint, client: SocketAddr) -> Self {
        Self {
            request_id,
            endpoint,
            client,
            started: Instant::now(),
            status: None,
            attempts: SmallVec::new(),
            prompt_tokens: None,
            cached_tokens: None,
            first_byte: None,
            bytes: 0,
            end: End::default(),
        }
    }
}

/// One attempt: the request was sent to `replica`.
#[derive(Debug)]
pub struct Attempt {
    pub replica: Arc<Replica>,
    /// Reason of the policy for this worker.
    pub reason: Reason,
    /// Time from the start of the request to this attempt.
    pub at: Duration,
    /// Id of the attempt's span.
    pub span: u64,
}

/// The end of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// The request was dropped before its response was complete: the client has disconnected.
    #[default]
    ClientGone,
    /// The client got a complete response, which may be an error.
    Complete,
    /// The response broke off after it had started.
    Broken,
}

impl End {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ClientGone => "client_gone",
            Self::Complete => "complete",
            Self::Broken => "error",
        }
    }
}
