//! Tests the distribution of load over workers, by simulations in virtual time of fleets that once went wrong.

#![forbid(unsafe_code)]

#[allow(dead_code, unreachable_pub, reason = "the bench uses the rest")]
mod simulation;

use mla_router::config::PolicyName;
use simulation::{Outcome, Script, World, exponential, percentile, run};

/// Requests with a common system prompt of `shared` blocks and `own` further blocks each, `rate` of them a second.
fn requests(count: u64, shared: u64, own: u64, rate: f64) -> Vec<Script> {
    let mut dice = fastrand::Rng::with_seed(5);
    let mut time = 0.0;
    let script = |number| {
        time += exponential(&mut dice, 1.0 / rate);
        Script::new(0, shared, number, shared + own, time, false)
    };
    (0..count).map(script).collect()
}

fn most(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn router_restart_with_warm_workers_makes_no_hot_spot() {
    let scripts = requests(1600, 128, 64, 15.0);
    let mut world = World::new(PolicyName::CacheAware, 1);
    world.restart = Some(600);
    let Outcome { in_flight, first_bytes, .. } = run(&world, &scripts);
    let p99 = percentile(&first_bytes, 99);
    // A single owner for all prompts with this system prompt would have 13.9 requests in flight, and 131 ms.
    assert!(most(&in_flight) < 1.3 * mean(&in_flight) && p99 < 0.12, "{in_flight:?} {p99}");
}

#[test]
fn slower_workers_get_fewer_requests() {
    let scripts = requests(1600, 0, 128, 8.0);
    let mut world = World::new(PolicyName::CacheAware, 1);
    world.slowness = vec![1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0];
    let Outcome { requests, .. } = run(&world, &scripts);
    // With equal speeds they would get 436.
    assert!(requests[4..].iter().sum::<usize>() < 160, "{requests:?}");
}

#[test]
fn hot_prefix_makes_no_hot_spot_with_several_routers() {
    let scripts = requests(1000, 128, 8, 10.0);
    let mut world = World::new(PolicyName::CacheAware, 8);
    world.reports_load = false;
    let blind = run(&world, &scripts);
    world.reports_load = true;
    let seeing = run(&world, &scripts);
    let (before, now) = (most(&blind.in_flight), most(&seeing.in_flight));
    assert!(now < 0.5 * before, "{now:.1} of {before:.1} requests in flight");
    assert!(seeing.mean_first_byte() < 1.1 * blind.mean_first_byte());
}

/// SGLang's generated-shared-prefix: 64 groups of 16 prompts.
#[test]
fn several_routers_use_prefixes_cached_by_each_other() {
    let mut dice = fastrand::Rng::with_seed(3);
    let mut order: Vec<u64> = (0..64 * 16).collect();
    dice.shuffle(&mut order);
    let mut time = 0.0;
    let script = |number: u64| {
        time += exponential(&mut dice, 1.0 / 40.0);
        Script::new(number / 16, 128, number, 136, time, false)
    };
    let scripts: Vec<Script> = order.into_iter().map(script).collect();
    for routers in [4, 8] {
        let Outcome { hits, .. } = run(&World::new(PolicyName::CacheAware, routers), &scripts);
        // One router reaches 88.1%. The difference is the price of an even load.
        assert!(hits > 0.845, "{routers} routers: {hits}");
    }
}
