//! Feedback from responses to the tree, to the learned state of the caches, and to the metrics.

use std::sync::Arc;

use tokio::time::Instant;

use super::Router;
use crate::{
    correct::{Finding, Report, Usage},
    fleet::LoadGuard,
    key::{Measure, RouteKey},
};

/// Maximum ratio between the tokens of a prompt and the router's estimate. A report beyond it is wrong, and would make
/// its worker look fast.
const MAX_TOKEN_RATIO: u64 = 8;

impl Router {
    /// Applies a report of a worker on a prompt. A response may have several reports; the first one with cached tokens
    /// counts.
    pub fn learn(&self, key: &RouteKey, guard: &mut LoadGuard, usage: Usage) {
        let replica = Arc::clone(guard.replica());
        let prediction = &mut guard.prediction;
        let (report, finding) =
            replica.learned.learn(&self.tree, replica.id, key, prediction, usage);
        if let Some(Report { prompt, predicted, cached }) = report {
            replica.counters.cache(guard.reason, prompt, predicted, cached);
            // A worker may know a prompt whose text the router does not see, so such prompts are ignored here.
            if key.measure != Measure::Unknown {
                let possible = key.prompt_tokens.saturating_mul(MAX_TOKEN_RATIO);
                guard.computed((prompt - cached).min(possible));
                if let Some(at_owner) = guard.at_owner {
                    let (unknown, found) = (prompt - predicted, cached.saturating_sub(predicted));
                    self.owner_share.observe(at_owner, unknown, found, Instant::now());
                }
            }
        }
        let name = replica.name();
        match finding {
            Some(Finding::Evicted { blocks }) => {
                replica.counters.evicted_blocks.add(blocks);
                let capacity = replica.learned.capacity();
                tracing::debug!(
                    "worker {name} has evicted {blocks} blocks, keeps about {capacity}"
                );
            }
            Some(Finding::Emptied) => {
                replica.counters.emptied.increment();
                tracing::warn!(
                    "worker {name} has lost its cache: nothing of the last prompts was cached"
                );
            }
            Some(Finding::NoCache) => {
                replica.counters.emptied.increment();
                tracing::debug!(
                    "worker {name} never has anything cached: is its prefix cache off?"
                );
            }
            None => {}
        }
    }

    /// Takes back the insertion of a prompt that was not computed. Has no effect once the worker has reported cached
    /// tokens.
    pub fn retract_insertion(&self, key: &RouteKey, guard: &mut LoadGuard) {
        if let Some(receipt) = guard.prediction.take_receipt() {
            self.tree.retract(key, guard.replica().id, &receipt);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;

    use super::*;
    use crate::{config::Config, policy::Reason};

    #[tokio::test]
    async fn prompts_that_the_router_cannot_measure_tell_nothing_of_other_routers() {
        for (measure, tells) in [(Measure::Text, true), (Measure::Unknown, false)] {
            let worker_urls = vec!["http://127.0.0.1:1".parse().expect("a URL")];
            let router = Router::new(Config { worker_urls, ..Config::default() });
            let router = router.expect("a config to start with");
            let key = RouteKey { measure, prompt_tokens: 1600, ..RouteKey::default() };
            let mut guard = router.registry.replicas()[0].reserve(1600, Reason::Cold);
            guard.at_owner = Some(true);
            let usage = Usage { prompt_tokens: Some(1600), cached_tokens: Some(1500) };
            router.learn(&key, &mut guard, usage);
            assert_eq!(router.owner_share.share(Instant::now()) > 0.0, tells, "{measure:?}");
            router.retire();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_of_more_tokens_than_the_prompt_can_have_does_not_make_a_worker_look_fast() {
        let worker_urls = vec!["http://127.0.0.1:1".parse().expect("a URL")];
        let router = Router::new(Config { worker_urls, ..Config::default() });
        let router = router.expect("a config to start with");
        let replica = Arc::clone(&router.registry.replicas()[0]);
        let token_seconds = || replica.candidate(0, Instant::now()).token_seconds;
        let mut usual = None;
        for request in 0..100 {
            let tokens = 1000 + 100 * (request % 4);
            let key = RouteKey { prompt_tokens: tokens, ..RouteKey::default() };
            let mut guard = replica.reserve(tokens, Reason::Cold);
            advance(Duration::from_micros(200 * tokens)).await;
            guard.prefill_done(true);
            let reported = if request == 80 { u64::from(u32::MAX) } else { tokens };
            let usage = Usage { prompt_tokens: Some(reported), cached_tokens: Some(0) };
            usual = usual.or(token_seconds());
            router.learn(&key, &mut guard, usage);
            if let (Some(usual), Some(now)) = (usual, token_seconds()) {
                assert!((0.5..2.0).contains(&(now / usual)), "request {request}: {now}");
            }
        }
        assert!(usual.is_some());
        router.retire();
    }
}
