//! The prefix tree.

use crate::{key::RouteKey, worker_id::WorkerId};

#[derive(Debug, Default)]
pub struct PrefixTree {}

impl PrefixTree {
    pub fn new() -> Self {
        Self::default()
    }
    pub fn lookup(&self, _key: &RouteKey, out: &mut Vec<(WorkerId, u32)>) {
        out.clear();
    }
    pub fn insert(&self, _key: &RouteKey, _worker: WorkerId) {}
    pub fn remove_worker(&self, _worker: WorkerId) {}
    pub fn set_capacity(&self, _worker: WorkerId, _blocks: u64) {}
}
