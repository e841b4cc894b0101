//! Cache-aware routing by several routers that share the workers and do not communicate:
//! `cargo bench -p mla-router --bench several_routers`.
//!
//! A simulation in virtual time of eight workers that report their load (`tests/simulation`). Prints one JSON line.

#![allow(clippy::print_stdout)]

#[path = "../tests/simulation/mod.rs"]
#[allow(dead_code, unreachable_pub, reason = "the tests use the rest")]
mod simulation;

use mla_router::config::PolicyName;
use serde_json::json;
use simulation::{ANSWER_BLOCKS, Script, World, exponential, percentile, run};

const ROUTERS: [usize; 4] = [1, 2, 4, 8];
const POLICIES: [PolicyName; 4] = [
    PolicyName::CacheAware,
    PolicyName::CacheAwareThreshold,
    PolicyName::PrefixHash,
    PolicyName::RoundRobin,
];

/// SGLang's generated-shared-prefix: 64 groups of 16 prompts with a system prompt of 2048 tokens and a question of
/// 128, in random order, 40 a second.
fn shared_prefix(dice: &mut fastrand::Rng) -> Vec<Script> {
    let mut order: Vec<u64> = (0..64 * 16).collect();
    dice.shuffle(&mut order);
    let mut time = 0.0;
    let script = |number: u64| {
        time += exponential(dice, 1.0 / 40.0);
        Script::new(number / 16, 128, number, 136, time, false)
    };
    order.into_iter().map(script).collect()
}

/// 256 conversations of 8 turns, each with its own system prompt of 480 tokens and questions of 160. A user thinks
/// for ten seconds.
fn conversations(dice: &mut fastrand::Rng) -> Vec<Script> {
    let mut scripts = Vec::new();
    for conversation in 0..256 {
        let start = dice.f64() * 120.0;
        for turn in 0..8 {
            let prompt = 40 + turn * (10 + ANSWER_BLOCKS);
            let delay = if turn == 0 { start } else { exponential(dice, 10.0) };
            scripts.push(Script::new(0, 0, conversation, prompt, delay, turn > 0));
        }
    }
    scripts
}

type Workload = fn(&mut fastrand::Rng) -> Vec<Script>;

fn main() {
    let workloads: [(&str, Workload); 2] =
        [("shared_prefix", shared_prefix), ("conversations", conversations)];
    let mut rows = Vec::new();
    println!("workload       policy                 routers  hits  max/mean  TTFT s   p99 s");
    for (workload, scripts) in workloads {
        let scripts = scripts(&mut fastrand::Rng::with_seed(3));
        for policy in POLICIES {
            for routers in ROUTERS {
                let outcome = run(&World::new(policy, routers), &scripts);
                let (hits, load) = (outcome.hits, outcome.most_over_mean);
                let wait = outcome.mean_first_byte();
                let p99 = percentile(&outcome.first_bytes, 99);
                let policy = policy.as_str();
                println!(
                    "{workload:14} {policy:21} {routers:8} {hits:6.3} {load:8.2} {wait:8.3} {p99:7.2}"
                );
                rows.push(json!({
                    "workload": workload, "policy": policy, "routers": routers,
                    "hit_share": hits, "max_over_mean_load": load,
                    "ttft_mean_s": wait, "ttft_p99_s": p99,
                }));
            }
        }
    }
    println!("{}", json!({"bench": "several_routers", "rows": rows}));
}
