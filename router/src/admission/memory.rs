//! A limit on the memory of all request bodies together. A hundred bodies may each be within the limit of one body,
//! and together exceed the memory of the machine.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::error::Error;

/// The limit as a multiple of --max-payload-size. A growing body takes up to twice its size, and one large body
/// must not keep all others out.
const MAX_BODIES: usize = 4;

/// The memory of bodies in several pieces. A body in one piece is as small as a read buffer and does not count.
#[derive(Debug)]
pub struct BodyMemory {
    limit: usize,
    held: AtomicUsize,
}

impl BodyMemory {
    pub(crate) fn new(max_payload_size: usize) -> Self {
        let limit = max_payload_size.saturating_mul(MAX_BODIES);
        Self { limit, held: AtomicUsize::new(0) }
    }

    /// Number of reserved bytes.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}

/// The memory of one body. Dropping it releases the memory.
#[derive(Debug)]
pub(crate) struct MemoryReservation {
    memory: Arc<BodyMemory>,
    bytes: usize,
}

impl MemoryReservation {
    pub(crate) fn new(memory: &Arc<BodyMemory>) -> Self {
        Self { memory: Arc::clone(memory), bytes: 0 }
    }

    /// Grows the reservation to `bytes`. Fails with `BodiesTooLarge` at the limit.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), Error> {
        let more = bytes.saturating_sub(self.bytes);
        let BodyMemory { limit, held } = &*self.memory;
        // One atomic step: a refused body that counts for a moment would make other bodies fail.
        let fitting = |held: usize| held.checked_add(more).filter(|held| held <= limit);
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fitting)
            .map_err(|_| Error::BodiesTooLarge { limit: *limit })?;
        self.bytes += more;
        Ok(())
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.memory.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
