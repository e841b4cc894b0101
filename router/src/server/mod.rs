//! The connections of clients: accepts them, refuses ambiguous and unauthorized requests, and closes the connections
//! in order.
//!
//! [`listen`] accepts, and answers a [`probe`] itself. Any other connection is a task of [`connection`], where hyper
//! reads through a [`guard`] that checks each head with [`head`]. [`auth`] checks keys and origins. [`forward`] sends
//! the request to a worker.

mod answer;
mod auth;
pub(crate) mod connection;
mod connection_limit;
mod forward;
mod guard;
mod head;
mod keep_alive;
pub mod listen;
mod probe;
pub mod request_id;
mod sites;
pub(crate) mod tls;
