//! The connections of clients: accepts them, refuses ambiguous and unauthorized requests, and closes the connections
//! in order.
//!
//! [`listen`] accepts, and answers a [`probe`] itself. Any other connection is a task of [`connection`]. It reads
//! requests from a [`client_stream`], which checks each head with [`head`], and writes responses with a
//! [`response_writer`]. [`auth`] checks keys and origins. [`forward`] sends the request to a worker.
//!
//! The HTTP/1.1 here is the router's own, like that to workers: a server library in front of strict checks would parse
//! each head twice.

mod answer;
mod auth;
mod client_stream;
pub(crate) mod connection;
mod connection_limit;
mod date;
mod forward;
mod head;
pub mod listen;
mod probe;
mod request_body;
pub mod request_id;
mod response_writer;
mod sites;
pub(crate) mod tls;
