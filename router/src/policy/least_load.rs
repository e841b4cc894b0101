//! The worker with the fewest requests; ties go to the worker with the fewest pending prompt tokens.

use super::{Candidate, Choice, Policy, PolicyRequest, Reason};

#[derive(Debug)]
pub struct LeastLoad;

impl Policy for LeastLoad {
    fn name(&self) -> &'static str {
        "least_load"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        Some(request.choice(workers, least_loaded(workers)?, Reason::LeastLoad))
    }
}

pub(super) fn load(worker: &Candidate) -> (u32, u64) {
    (worker.requests, worker.pending_tokens)
}

/// Returns the index of the least loaded worker. Ties are broken at random: several routers would otherwise all
/// choose the first worker.
pub fn least_loaded(workers: &[Candidate]) -> Option<usize> {
    let least = workers.iter().map(load).min()?;
    let equal = || (0..workers.len()).filter(|index| load(&workers[*index]) == least);
    equal().nth(fastrand::usize(..equal().count()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::workers;

    #[test]
    fn requests_count_first_then_tokens() {
        let states = [(2, 0, 0), (1, 500, 9), (1, 400, 0), (3, 0, 0)];
        assert_eq!(least_loaded(&workers(&states)), Some(2));
    }

    #[test]
    fn equal_workers_share_the_load() {
        let workers = workers(&[(1, 0, 0), (0, 0, 0), (0, 0, 0), (0, 1, 0)]);
        let mut chosen = [0; 4];
        for _ in 0..1000 {
            chosen[least_loaded(&workers).expect("workers")] += 1;
        }
        assert_eq!((chosen[0], chosen[3]), (0, 0));
        assert!(chosen[1] > 400 && chosen[2] > 400, "{chosen:?}");
    }
}
