//! A hash of the session selects the worker, so all routers choose the same one without a table. Requests without a
//! session go to the least loaded worker.

use super::{
    Candidate, Choice, Policy, PolicyRequest, Reason, least_load::least_loaded, rendezvous,
};

#[derive(Debug)]
pub struct ConsistentHash;

impl Policy for ConsistentHash {
    fn name(&self) -> &'static str {
        "consistent_hash"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        let (index, reason) = match request.session() {
            Some(session) => (rendezvous::highest(session, workers), Reason::Hash),
            None => (least_loaded(workers), Reason::LeastLoad),
        };
        Some(request.choice(workers, index?, reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::{in_session, workers};

    #[test]
    fn session_stays_under_any_load() {
        let idle = workers(&[(0, 0, 0); 8]);
        for session in 0..100 {
            let key = in_session(session);
            let request = PolicyRequest { key: Some(&key), ..PolicyRequest::default() };
            let choice = ConsistentHash.choose(&request, &idle).expect("workers");
            let mut busy = idle.clone();
            busy[choice.index].requests = 1000;
            assert_eq!(ConsistentHash.choose(&request, &busy), Some(choice));
            assert_eq!(choice.reason, Reason::Hash);
        }
    }

    #[test]
    fn without_a_session_the_least_loaded_worker_takes_it() {
        let workers = workers(&[(2, 0, 0), (1, 0, 0)]);
        let choice = ConsistentHash.choose(&PolicyRequest::default(), &workers);
        let choice = choice.expect("workers");
        assert_eq!((choice.index, choice.reason), (1, Reason::LeastLoad));
    }
}
