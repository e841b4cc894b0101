//! Towards clients: accepts connections, sees that what comes over them is one honest request at a
//! time from somebody who may send it, and takes them down in order.
//!
//! [`listen`] accepts; each connection is a task of [`connection`], where hyper reads through a
//! [`guard`] that judges each head by [`head`]. [`auth`] decides who may ask what;
//! [`forward`] has a worker answer it.

mod answer;
mod auth;
pub(crate) mod connection;
mod forward;
mod guard;
mod head;
pub mod listen;
mod places;
pub mod request_id;
mod sites;
pub(crate) mod tls;
mod turn;
