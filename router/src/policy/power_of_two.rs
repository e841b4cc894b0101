//! The less loaded of two random workers. The load is nearly as even as with a comparison of all workers, and
//! several routers do not all choose the same worker.

use super::{Candidate, Choice, Policy, PolicyRequest, Reason, least_load::load};

#[derive(Debug)]
pub struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn name(&self) -> &'static str {
        "power_of_two"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        let index = match workers.len() {
            0 => return None,
            1 => 0,
            count => {
                let first = fastrand::usize(..count);
                // One of the others.
                let second = (first + fastrand::usize(1..count)) % count;
                let better = load(&workers[second]) < load(&workers[first]);
                if better { second } else { first }
            }
        };
        Some(request.choice(workers, index, Reason::LeastLoad))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::workers;

    #[test]
    fn most_loaded_worker_gets_nothing_and_least_loaded_the_most() {
        let workers = workers(&[(1, 0, 0), (5, 0, 0), (3, 0, 0), (2, 0, 0)]);
        let mut chosen = [0; 4];
        for _ in 0..1200 {
            let choice = PowerOfTwo.choose(&PolicyRequest::default(), &workers);
            chosen[choice.expect("workers").index] += 1;
        }
        // Of six pairs it wins three, none, one and two.
        assert_eq!(chosen[1], 0);
        assert!(chosen[0] > chosen[3] && chosen[3] > chosen[2] && chosen[2] > 100, "{chosen:?}");
    }
}
