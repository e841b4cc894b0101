//! Requests and workers for the tests of the policies.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::Candidate;
use crate::{key::RouteKey, names::WorkerId};

/// A prompt of `blocks` blocks that shares none with those of other groups.
pub(super) fn prompt(group: u64, blocks: u64) -> RouteKey {
    RouteKey {
        blocks: (0..blocks).map(|block| group * 1000 + block).collect(),
        prompt_tokens: blocks * 16,
        ..RouteKey::default()
    }
}

/// A prompt of one block in a session.
pub(super) fn in_session(session: u64) -> RouteKey {
    RouteKey { session: Some(session), ..prompt(session, 1) }
}

/// Workers with these outstanding requests, pending tokens and matched blocks.
pub(super) fn workers(states: &[(u32, u64, u32)]) -> Vec<Candidate> {
    let numbered = states.iter().enumerate();
    let candidate = |(id, state): (usize, &(u32, u64, u32))| Candidate {
        id: WorkerId(id as u32),
        requests: state.0,
        other_requests: 0,
        pending_tokens: state.1,
        matched_blocks: state.2,
        hash_seed: xxh3_64_with_seed(b"url", id as u64),
        token_seconds: None,
    };
    numbered.map(candidate).collect()
}
