//! The number that stands for a worker inside the router.

/// Given out by the registry, never used again for another worker while the process lives: what
/// was booked or remembered under an old number can then never be blamed on a new worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u32);
