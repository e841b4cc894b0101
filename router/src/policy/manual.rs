//! A session stays on the worker of its first request while that worker exists. New sessions, and requests without
//! a session, go to the least loaded worker.
//!
//! The table is bounded. It forgets the oldest sessions that were not used during its last 65,536 changes.

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::{Candidate, Choice, Policy, PolicyRequest, Reason, least_load::least_loaded};
use crate::names::WorkerId;

/// Sessions in one generation of the table.
const GENERATION: usize = 1 << 16;

#[derive(Debug, Default)]
pub struct Manual {
    table: Mutex<Table>,
}

/// Two generations of sessions. A session that is used moves to the young generation. A full young generation
/// becomes the old one, and the previous old one is dropped. This is an approximate LRU in constant time, without a
/// linked list.
#[derive(Debug)]
struct Table {
    young: FxHashMap<u64, WorkerId>,
    old: FxHashMap<u64, WorkerId>,
}

impl Default for Table {
    fn default() -> Self {
        // Allocated in full: a table that grows stalls a request.
        let map = || FxHashMap::with_capacity_and_hasher(GENERATION, rustc_hash::FxBuildHasher);
        Self { young: map(), old: map() }
    }
}

impl Table {
    fn get(&mut self, session: u64) -> Option<WorkerId> {
        if let Some(worker) = self.young.get(&session) {
            return Some(*worker);
        }
        let worker = self.old.remove(&session)?;
        self.put(session, worker);
        Some(worker)
    }

    fn put(&mut self, session: u64, worker: WorkerId) {
        if self.young.len() == GENERATION {
            self.old.clear();
            std::mem::swap(&mut self.young, &mut self.old);
        }
        self.young.insert(session, worker);
    }
}

impl Policy for Manual {
    fn name(&self) -> &'static str {
        "manual"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        let Some(session) = request.session() else {
            return Some(request.choice(workers, least_loaded(workers)?, Reason::LeastLoad));
        };
        let mut table = self.table.lock();
        if let Some(known) = table.get(session)
            && let Some(index) = workers.iter().position(|worker| worker.id == known)
        {
            return Some(request.choice(workers, index, Reason::Session));
        }
        let index = least_loaded(workers)?;
        table.put(session, workers[index].id);
        Some(request.choice(workers, index, Reason::LeastLoad))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::{in_session, workers};

    fn choose(policy: &Manual, session: u64, workers: &[Candidate]) -> Choice {
        let key = in_session(session);
        policy
            .choose(&PolicyRequest { key: Some(&key), ..PolicyRequest::default() }, workers)
            .expect("workers")
    }

    #[test]
    fn a_session_stays_until_its_worker_is_lost() {
        let policy = Manual::default();
        let all = workers(&[(5, 0, 0), (0, 0, 0), (7, 0, 0)]);
        let first = choose(&policy, 1, &all);
        assert_eq!((first.index, first.reason), (1, Reason::LeastLoad));
        let busy = workers(&[(5, 0, 0), (90, 0, 0), (7, 0, 0)]);
        let again = choose(&policy, 1, &busy);
        assert_eq!((again.index, again.reason), (1, Reason::Session));
        let moved = choose(&policy, 1, &[all[0], all[2]]);
        assert_eq!((moved.index, moved.reason), (0, Reason::LeastLoad));
        assert_eq!(choose(&policy, 1, &all).index, 0, "it does not move back");
    }

    #[test]
    fn the_table_is_bounded_and_keeps_sessions_in_use() {
        let policy = Manual::default();
        let all = workers(&[(0, 0, 0), (1, 0, 0)]);
        choose(&policy, 0, &all);
        let other = workers(&[(1, 0, 0), (0, 0, 0)]);
        for session in 1..5 * GENERATION as u64 {
            choose(&policy, session, &other);
            if session.is_multiple_of(GENERATION as u64 / 2) {
                assert_eq!(choose(&policy, 0, &other).index, 0);
            }
        }
        let table = policy.table.lock();
        assert!(table.young.len() + table.old.len() <= 2 * GENERATION);
        assert!(!table.young.contains_key(&1) && !table.old.contains_key(&1));
        assert_eq!(table.young.capacity(), Table::default().young.capacity());
    }
}
