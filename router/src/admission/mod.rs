//! How much at a time: requests on the workers and in line for them ([`Queue`]), retries ([`Budget`]),
//! memory for bodies ([`BodyMemory`]).

mod budget;
mod memory;
mod outflow;
mod queue;
mod window;

pub use budget::Budget;
pub use memory::BodyMemory;
pub(crate) use memory::Held;
pub(crate) use queue::Ticket;
pub use queue::{Lane, Queue, Slot};
