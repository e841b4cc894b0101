//! The response of a worker whose beginning has been checked.

use bytes::Bytes;
use http::response::Parts;

use super::peek::Rest;
use crate::fleet::LoadGuard;

/// The response of a worker whose start has arrived. Its status is not 429, 500 or 502 to 504: these are failed
/// attempts.
pub struct Reply {
    pub head: Parts,
    /// The start of the body: at least the first event of a stream, or a JSON value up to its size limit. The whole
    /// body if there is no `rest`.
    pub first: Bytes,
    pub rest: Option<Rest>,
    pub guard: LoadGuard,
    /// Whether the router has requested token counts that the client has not.
    pub asked_usage: bool,
}
