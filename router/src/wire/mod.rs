//! Protocol elements without requests or workers: sockets ([`transport`]), header fields, the common parts of HTTP/1.1
//! connections, chunked bodies, server-sent events.

pub(crate) mod chunked;
pub mod events;
pub mod headers;
pub(crate) mod http1;
pub(crate) mod transport;
