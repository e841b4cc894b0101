//! The response of a worker after the check of its start.

use bytes::Bytes;
use http::response::Parts;

use super::peek::Rest;
use crate::fleet::LoadGuard;

/// The response of a worker. Its status is never 429, 500 or 502 to 504: these are failed attempts.
pub struct Reply {
    pub head: Parts,
    /// The start of the body: at least the first event of a stream, or a JSON value up to its size limit. Without a
    /// `rest` it is the whole body.
    pub first: Bytes,
    pub rest: Option<Rest>,
    pub guard: LoadGuard,
    /// Whether the router, and not the client, has requested token counts.
    pub asked_usage: bool,
}
