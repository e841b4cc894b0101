//! The memory that bodies take, all together. One that is too large is refused for its own sake; a
//! hundred that are not might still be more than the machine has.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::error::Error;

/// So many times --max-payload-size: a body that grows as it comes takes up to twice its size, and
/// one large body must not keep all others out.
const LARGEST_BODIES: usize = 4;

/// What bodies that came in more than one piece take. The others are as small as a buffer for reading.
#[derive(Debug)]
pub struct BodyMemory {
    limit: usize,
    held: AtomicUsize,
}

impl BodyMemory {
    pub(crate) fn new(max_payload_size: usize) -> Self {
        let limit = max_payload_size.saturating_mul(LARGEST_BODIES);
        Self { limit, held: AtomicUsize::new(0) }
    }

    /// Bytes now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}

/// One body's share, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    memory: Arc<BodyMemory>,
    bytes: usize,
}

impl Held {
    pub(crate) fn new(memory: &Arc<BodyMemory>) -> Self {
        Self { memory: Arc::clone(memory), bytes: 0 }
    }

    /// Takes what is missing to `bytes`.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), Error> {
        let more = bytes.saturating_sub(self.bytes);
        let BodyMemory { limit, held } = &*self.memory;
        // In one step: who is refused must not be counted for a moment, or it would refuse others.
        let fitting = |held: usize| held.checked_add(more).filter(|held| held <= limit);
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fitting)
            .map_err(|_| Error::BodiesTooLarge { limit: *limit })?;
        self.bytes += more;
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.memory.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
