//! A random worker, regardless of cache and load.

use super::{Candidate, Choice, Policy, PolicyRequest, Reason};

#[derive(Debug)]
pub struct Random;

impl Policy for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        if workers.is_empty() {
            return None;
        }
        Some(request.choice(workers, fastrand::usize(..workers.len()), Reason::Random))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::workers;

    #[test]
    fn all_workers_get_their_share() {
        let workers = workers(&[(9, 0, 0), (0, 0, 0), (5, 10_000, 0)]);
        let mut chosen = [0; 3];
        for _ in 0..3000 {
            let choice = Random.choose(&PolicyRequest::default(), &workers).expect("workers");
            chosen[choice.index] += 1;
        }
        assert!(chosen.iter().all(|requests| (800..=1200).contains(requests)), "{chosen:?}");
    }
}
