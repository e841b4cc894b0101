//! How much at a time: requests on the workers and in line for them ([`Queue`]), retries ([`Budget`]),
//! memory for bodies ([`BodyMemory`]).

mod budget;
mod client;
mod line;
mod memory;
mod outflow;
mod queue;
mod shares;
mod slots;
mod ticket;
mod window;

pub use budget::Budget;
pub use client::Client;
pub use memory::BodyMemory;
pub(crate) use memory::Held;
pub use queue::{Lane, Queue, Slot};
pub(crate) use ticket::Ticket;
