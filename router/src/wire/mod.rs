//! Protocol elements without requests or workers: sockets ([`transport`]), header fields, server-sent events.

pub mod events;
pub mod headers;
pub(crate) mod transport;
