//! Policies: pure functions from a key and a snapshot to a choice.

use crate::{key::RouteKey, worker_id::WorkerId};

pub struct PolicyRequest<'a> {
    pub key: Option<&'a RouteKey>,
}

#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub id: WorkerId,
    pub requests: u32,
    pub pending_tokens: u64,
    pub matched_blocks: u32,
    pub hash_seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    Cold,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        "cold"
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Choice {
    pub index: usize,
    pub uncached_tokens: u32,
    pub reason: Reason,
}

pub trait Policy: Send + Sync {
    fn name(&self) -> &'static str;
    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice>;
    fn uses_tree(&self) -> bool;
}
