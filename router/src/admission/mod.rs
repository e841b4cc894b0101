//! Admission control: the queue of requests ([`Queue`]), the budget for retries ([`Budget`]), and the memory for bodies
//! ([`BodyMemory`]).

mod budget;
mod client;
mod line;
mod lines;
mod memory;
mod outflow;
mod queue;
mod shares;
mod slots;
mod window;

pub use budget::Budget;
pub use client::Client;
pub use lines::LineKey;
pub use memory::BodyMemory;
pub(crate) use memory::MemoryReservation;
pub(crate) use queue::Ticket;
pub use queue::{Queue, Slot};
