//! The connections of clients: accepts them, checks that each request has one reading and may be sent, and closes
//! them in order.
//!
//! [`listen`] accepts, and answers a [`probe`] itself. Any other connection is a task of [`connection`], where hyper
//! reads through a [`guard`] that checks each head with [`head`]. [`auth`] checks keys and origins. [`forward`] sends
//! the request to a worker.

mod answer;
mod auth;
pub(crate) mod connection;
mod forward;
mod guard;
mod head;
mod keep_alive;
pub mod listen;
mod places;
mod probe;
pub mod request_id;
mod sites;
pub(crate) mod tls;
