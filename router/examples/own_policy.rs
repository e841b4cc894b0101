//! A custom routing policy. Long prompts go to one half of the workers and short ones to the other, so a short
//! request never waits behind a long prefill.
//!
//! ```text
//! cargo run -p mla-router --example own_policy -- --port 30000 \
//!     --worker-urls http://127.0.0.1:31000 http://127.0.0.1:31001
//! ```
//!
//! A policy is a pure function of a request and a snapshot of the candidates. Health checks, retries, queues and
//! continued streams work the same with every policy.

use std::error::Error;

use clap::Parser;
use mla_router::{
    Config, RouterHandle,
    policy::{Candidate, Choice, Policy, PolicyRequest, Reason},
};
use tokio::signal::ctrl_c;

/// Least number of tokens of a long prompt.
const LONG: u64 = 2_048;

struct ByLength;

impl Policy for ByLength {
    fn name(&self) -> &'static str {
        "by_length"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        let tokens = request.key.map_or(0, |key| key.prompt_tokens);
        let half = workers.len() / 2;
        let own = if tokens >= LONG { half..workers.len() } else { 0..half.max(1) };
        let index = own.min_by_key(|&index| workers.get(index).map(|worker| worker.requests))?;
        (index < workers.len()).then(|| Choice {
            index,
            uncached_tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
            reason: Reason::LeastLoad,
            at_owner: None,
        })
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let config = Config::parse();
    let router = RouterHandle::start_with_policy(config, Box::new(ByLength)).await?;
    println!("serving on http://{}", router.local_addr());
    ctrl_c().await?;
    router.drain(router.router().config.shutdown_grace_period_secs.get()).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use mla_router::{key::RouteKey, names::WorkerId};

    use super::*;

    fn worker(requests: u32) -> Candidate {
        Candidate {
            id: WorkerId(requests),
            requests,
            other_requests: 0,
            pending_tokens: 0,
            matched_blocks: 0,
            hash_seed: 0,
            token_seconds: None,
        }
    }

    fn chosen(tokens: u64, requests: &[u32]) -> Option<usize> {
        let workers: Vec<_> = requests.iter().map(|&requests| worker(requests)).collect();
        let key = RouteKey { prompt_tokens: tokens, ..RouteKey::default() };
        let request = PolicyRequest { key: Some(&key), owner_share: 0.0 };
        ByLength.choose(&request, &workers).map(|choice| choice.index)
    }

    #[test]
    fn long_and_short_prompts_have_halves_of_their_own() {
        assert_eq!(chosen(10, &[5, 1, 0, 0]), Some(1));
        assert_eq!(chosen(LONG, &[0, 0, 3, 2]), Some(3));
        assert_eq!(chosen(LONG, &[7]), Some(0));
        assert_eq!(chosen(10, &[7]), Some(0));
        assert_eq!(chosen(10, &[]), None);
    }
}
