//! Each worker in turn, regardless of cache and load. The baseline of comparisons.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Candidate, Choice, Policy, PolicyRequest, Reason};

#[derive(Debug, Default)]
pub struct RoundRobin {
    next: AtomicUsize,
}

impl Policy for RoundRobin {
    fn name(&self) -> &'static str {
        "round_robin"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let index = turn.checked_rem(workers.len())?;
        Some(request.choice(workers, index, Reason::RoundRobin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::workers;

    #[test]
    fn takes_turns() {
        let policy = RoundRobin::default();
        let request = PolicyRequest::default();
        let workers = workers(&[(3, 0, 0), (0, 0, 0), (90, 0, 0)]);
        let turns: Vec<_> = (0..6)
            .filter_map(|_| policy.choose(&request, &workers))
            .map(|choice| choice.index)
            .collect();
        assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
    }
}
