//! Support for the tests: a scripted worker, a client that sees each frame, and a router on a free port between
//! them, over real sockets.

mod cable;
mod client;
mod folder;
mod process;
mod scripted;
mod worker;

use std::{net::Ipv4Addr, pin::pin, sync::Once, time::Duration};

use mla_router::{Config, RouterHandle, fleet::Phase};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::TcpListener;

pub(crate) use cable::Cable;
pub(crate) use client::{Answer, Client, Raw, post, request};
pub(crate) use folder::Folder;
pub(crate) use process::{Process, run};
pub(crate) use worker::{
    Canary, ENDLESS_FRAME, Event, FakeWorker, GOOD, Reply, Seen, Speaks, Then,
};

/// Longest wait of a test, also on a busy machine.
const EVENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait on a paused clock.
const PAUSED_TIMEOUT_S: u32 = 120;

/// Waits for a future. A future that is not ready in time fails the test.
pub(crate) async fn soon<T>(awaited: impl Future<Output = T>) -> T {
    let begun = std::time::Instant::now();
    let mut awaited = pin!(awaited);
    for _ in 0..PAUSED_TIMEOUT_S {
        if let Ok(value) = tokio::time::timeout(secs(1.0).get(), awaited.as_mut()).await {
            return value;
        }
        if begun.elapsed() > EVENT_TIMEOUT {
            break;
        }
    }
    panic!("it did not happen");
}

/// The default settings with frequent health checks, and without deadlines that a busy machine could miss. Tests of
/// a deadline set it.
pub(crate) fn config() -> Config {
    let far = secs(3600.0);
    Config {
        health_check_interval_secs: secs(0.02),
        health_check_timeout_secs: far,
        connect_timeout_secs: far,
        upstream_idle_timeout_secs: far,
        first_token_timeout_secs: far,
        inter_token_timeout_secs: far,
        sse_keepalive_secs: far,
        allowed_hosts: vec!["*".parse().expect("any")],
        replay_key: Some("a-key-of-tests".parse().expect("a key")),
        ..Config::default()
    }
}

pub(crate) fn secs(seconds: f64) -> mla_router::config::Seconds {
    seconds.try_into().expect("a valid time")
}

/// A router in front of `workers`, all of them in rotation.
pub(crate) async fn router(config: Config, workers: &[&FakeWorker]) -> RouterHandle {
    let router = router_without_waiting(config, workers).await;
    all_in(Phase::Healthy, &router).await;
    router
}

pub(crate) async fn router_without_waiting(
    mut config: Config,
    workers: &[&FakeWorker],
) -> RouterHandle {
    let urls = workers.iter().map(|worker| worker.url().parse().expect("a valid URL"));
    config.worker_urls.extend(urls);
    allow_files();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    RouterHandle::serve(listener, config).await.expect("a config to start with")
}

/// Raises the limit on open files: parallel tests have hundreds of connections each.
fn allow_files() {
    static ALLOWED: Once = Once::new();
    ALLOWED.call_once(|| {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("Linux");
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("up to the hard limit anybody may");
    });
}

/// Waits until every worker is in that phase.
pub(crate) async fn all_in(phase: Phase, router: &RouterHandle) {
    let registry = &router.router().registry;
    soon(
        registry.wait_until(|workers| workers.iter().all(|worker| worker.backend.phase() == phase)),
    )
    .await;
}

/// Waits until no request is in the router. Then no load may be reserved.
pub(crate) async fn assert_nothing_reserved(router: &RouterHandle) {
    assert!(router.drain(EVENT_TIMEOUT).await, "a request is still in the router");
    for worker in router.workers() {
        assert_eq!((worker.requests, worker.pending_tokens), (0, 0), "{worker:?}");
    }
}
