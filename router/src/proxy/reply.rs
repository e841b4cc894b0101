//! The response of a worker after the check of its start.

use bytes::Bytes;
use http::response::Parts;
use tokio::time::Instant;

use crate::{fleet::LoadGuard, upstream::Connection};

/// The response of a worker. Its status is never 429, 500 or 502 to 504: these are failed attempts.
pub struct Reply {
    pub head: Box<Parts>,
    /// The start of the body: at least the first event of a stream, or a JSON value up to its size limit.
    pub first: Bytes,
    /// When this start had arrived.
    pub received: Instant,
    /// The connection with the rest of the body; `None` if `first` is the whole body.
    pub rest: Option<Connection>,
    pub guard: Box<LoadGuard>,
    /// Whether the router, and not the client, has requested token counts.
    pub asked_usage: bool,
}
