//! An arena of records that refer to each other by `u32` ids.

use std::ops::{Index, IndexMut};

/// The id of no record: the end of a list, or the parent of a root.
pub(super) const NIL: u32 = u32::MAX;

const CHUNK_BITS: u32 = 8;
const CHUNK: usize = 1 << CHUNK_BITS;

/// The arena. It grows by chunks and never moves its records: a `Vec` of ten million nodes would stall every
/// request behind the shard's lock whenever it doubles, and be half empty afterwards.
#[derive(Debug)]
pub(super) struct Slab<T> {
    chunks: Vec<Vec<T>>,
    /// Stack of free ids, in chunks for the same reason.
    free: Vec<Vec<u32>>,
}

impl<T> Slab<T> {
    pub(super) fn new() -> Self {
        Self { chunks: Vec::new(), free: Vec::new() }
    }

    pub(super) fn insert(&mut self, record: T) -> u32 {
        if let Some(id) = self.pop_free() {
            self[id] = record;
            return id;
        }
        if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let chunk = self.chunks.len() - 1;
        let last = &mut self.chunks[chunk];
        last.push(record);
        u32::try_from(chunk * CHUNK + last.len() - 1).expect("fewer than 2^32 records in a shard")
    }

    /// Frees `id` for a later record. The old record is dropped when it is overwritten.
    pub(super) fn remove(&mut self, id: u32) {
        if self.free.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.free.push(Vec::with_capacity(CHUNK));
        }
        self.free.last_mut().expect("pushed above").push(id);
    }

    fn pop_free(&mut self) -> Option<u32> {
        let last = self.free.last_mut()?;
        let id = last.pop();
        if last.is_empty() {
            self.free.pop();
        }
        id
    }

    /// Number of ids, used and free.
    pub(super) fn places(&self) -> usize {
        let last = self.chunks.last().map_or(0, Vec::len);
        self.chunks.len().saturating_sub(1) * CHUNK + last
    }

    pub(super) fn len(&self) -> usize {
        let last = self.free.last().map_or(0, Vec::len);
        self.places() - self.free.len().saturating_sub(1) * CHUNK - last
    }

    /// Bytes of memory, used and free.
    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * (CHUNK * size_of::<T>() + size_of::<Vec<T>>())
            + self.free.len() * (CHUNK * size_of::<u32>() + size_of::<Vec<u32>>())
    }
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, id: u32) -> &T {
        &self.chunks[(id >> CHUNK_BITS) as usize][id as usize % CHUNK]
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, id: u32) -> &mut T {
        &mut self.chunks[(id >> CHUNK_BITS) as usize][id as usize % CHUNK]
    }
}

#[cfg(test)]
mod tests {
    use super::{CHUNK, Slab};

    #[test]
    fn bytes_are_those_of_whole_chunks() {
        let mut slab = Slab::new();
        let ids: Vec<u32> = (0..=CHUNK as u64).map(|value| slab.insert(value)).collect();
        let header = 3 * size_of::<usize>();
        assert_eq!(slab.bytes(), 2 * (CHUNK * 8 + header));
        slab.remove(ids[3]);
        assert_eq!(slab.bytes(), 2 * (CHUNK * 8 + header) + CHUNK * 4 + header);
    }

    #[test]
    fn freed_places_are_used_again() {
        let mut slab = Slab::new();
        let ids: Vec<u32> = (0..1000).map(|value| slab.insert(value)).collect();
        for id in &ids[100..900] {
            slab.remove(*id);
        }
        assert_eq!((slab.len(), slab.places()), (200, 1000));
        let again: Vec<u32> = (0..800).map(|value| slab.insert(value)).collect();
        assert!(again.iter().rev().eq(&ids[100..900]));
        assert_eq!((slab.len(), slab.places(), slab[ids[999]]), (1000, 1000, 999));
    }
}
