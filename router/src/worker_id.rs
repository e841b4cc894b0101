//! The number that stands for a worker inside the router, never reused while the process lives.

/// Dense, small, and stable for as long as the worker stays registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u32);
