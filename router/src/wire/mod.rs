//! What goes between the router and whoever is at the other end: bytes ([`transport`]), header fields,
//! server-sent events. Nothing here knows a request or a worker.

pub mod events;
pub mod headers;
pub(crate) mod transport;
