//! `/metrics`: its counts, its format, and its bounded number of series.

use std::{
    collections::{HashMap, HashSet},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use http::{Method, StatusCode};
use mla_router::{Config, fleet::Phase};
use tokio::sync::Semaphore;

use crate::support::{
    Client, FakeWorker, Reply, all_in, config, request, router, router_without_waiting,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_counted() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..3 {
        client.post("/v1/chat/completions", r#"{"messages":[]}"#).await;
    }
    client.get("/nothing").await;
    let answer = client.get("/metrics").await;
    assert_eq!(answer.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let text = String::from_utf8(answer.body.to_vec()).expect("text");
    let url = worker.url();
    for line in [
        r#"mla_router_requests_total{endpoint="chat_completions",status="2xx"} 3"#.to_owned(),
        r#"mla_router_requests_total{endpoint="router",status="4xx"} 1"#.to_owned(),
        "mla_router_client_connections 1".to_owned(),
        "mla_router_client_connections_total 1".to_owned(),
        "mla_router_first_byte_seconds_count 3".to_owned(),
        "mla_router_request_seconds_count 3".to_owned(),
        "mla_router_overhead_seconds_count 3".to_owned(),
        format!(r#"mla_router_selections_total{{worker="{url}",reason="no_prefix"}} 3"#),
        format!(r#"mla_router_worker_healthy{{worker="{url}"}} 1"#),
        format!(r#"mla_router_worker_phase{{worker="{url}",phase="healthy"}} 1"#),
        format!(r#"mla_router_worker_breaker_state{{worker="{url}",state="open"}} 0"#),
        format!(r#"mla_router_worker_requests{{worker="{url}"}} 0"#),
        r#"mla_router_upstream_connections_total{state="reused"} 2"#.to_owned(),
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\nis not in\n{text}");
    }
    lint(&text);
    promtool(&text);
}

#[tokio::test(start_paused = true)]
async fn overhead_excludes_waiting() {
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let worker = FakeWorker::start(move |_| Reply::When(Arc::clone(&held))).await;
    worker.set_healthy(false);
    let config = Config { max_concurrent_requests: 1.try_into().expect("a number"), ..config() };
    let router = router_without_waiting(config, &[&worker]).await;
    // One request waits for a worker, the other one for the first.
    let clients = [0, 1].map(|_| {
        let address = router.local_addr();
        tokio::spawn(async move {
            let mut client = Client::connect(address).await;
            client.post("/v1/completions", r#"{"prompt":"a"}"#).await.status
        })
    });
    while router.router().queue.waiting() < 2 {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    worker.set_healthy(true);
    all_in(Phase::Healthy, &router).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    gate.add_permits(2);
    for client in clients {
        assert_eq!(client.await.expect("no panic"), StatusCode::OK);
    }
    let overhead = &router.router().metrics.overhead;
    assert_eq!(overhead.count(), 2);
    assert!(overhead.sum() < Duration::from_secs(1), "{:?}", overhead.sum());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_input_makes_no_new_series() {
    const REQUESTS: usize = 2000;
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    // The request for the page is on the next page.
    page(&mut client).await;
    let mut round = async |from: usize| {
        for i in from..from + REQUESTS {
            // Made-up path, method, model and headers in turn.
            let sent = match i % 4 {
                0 => request(Method::GET, &format!("/path-{i}"), ""),
                1 => {
                    let method = Method::from_bytes(format!("M{i}").as_bytes()).expect("a token");
                    request(method, "/v1/chat/completions", "")
                }
                2 => request(
                    Method::POST,
                    &format!("/v1/other-{i}"),
                    format!("{{\"model\":\"m{i}\"}}"),
                ),
                _ => {
                    let body = format!(r#"{{"model":"m{i}","messages":[{{"role":"r{i}"}}]}}"#);
                    let mut sent = request(Method::POST, "/v1/chat/completions", body);
                    let name = format!("x-{i}").parse::<http::HeaderName>().expect("a name");
                    sent.headers_mut().insert(name, format!("v{i}").parse().expect("a value"));
                    sent
                }
            };
            client.call(sent).await.expect("an answer");
        }
        let text = page(&mut client).await;
        lint(&text);
        text.lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| line.rsplit_once(' ').expect("a value").0.to_owned())
            .collect::<HashSet<_>>()
    };
    let (first, second) = (round(0).await, round(REQUESTS).await);
    let grown: Vec<_> = second.difference(&first).collect();
    assert!(grown.is_empty(), "{grown:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn series_of_a_removed_worker_are_removed() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    assert!(page(&mut client).await.contains(&worker.url()));
    router.remove_worker(&worker.url()).expect("registered");
    let text = page(&mut client).await;
    assert!(!text.contains(&worker.url()), "{text}");
    lint(&text);
    promtool(&text);
}

async fn page(client: &mut Client) -> String {
    let answer = client.get("/metrics").await;
    assert_eq!(answer.status, StatusCode::OK);
    String::from_utf8(answer.body.to_vec()).expect("text")
}

/// Checks the text format by its specification and by the rules of `promtool check metrics`.
fn lint(text: &str) {
    let mut types: HashMap<&str, &str> = HashMap::new();
    let mut family = "";
    let mut series = HashSet::new();
    let mut buckets: Vec<(f64, f64)> = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("a help text");
            assert!(help.ends_with('.'), "{line}");
            assert!(!types.contains_key(name), "a family twice: {line}");
            family = name;
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            assert_eq!(name, family, "TYPE follows its HELP");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            types.insert(name, kind);
        } else {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            let value: f64 = value.parse().expect("a number");
            assert!(value >= 0.0, "{line}");
            assert!(series.insert(name.to_owned()), "twice: {line}");
            let (bare, labels) = name.split_once('{').unwrap_or((name, ""));
            let suffix = bare.strip_prefix(family).expect("a series of the family above it");
            let le = labels.split("le=\"").nth(1).and_then(|rest| rest.split('"').next());
            if types[family] != "histogram" {
                assert!(suffix.is_empty() && le.is_none(), "{line}");
                continue;
            }
            match suffix {
                "_bucket" => {
                    let bound = le.expect("a bucket has a bound").parse().expect("a number");
                    buckets.push((bound, value));
                }
                "_sum" => {}
                "_count" => {
                    let rising =
                        buckets.windows(2).all(|two| two[0].0 < two[1].0 && two[0].1 <= two[1].1);
                    assert!(rising, "{family}: {buckets:?}");
                    assert_eq!(buckets.last(), Some(&(f64::INFINITY, value)), "{family}");
                    buckets.clear();
                }
                _ => panic!("{line}"),
            }
        }
    }
}

/// Checks the page with Prometheus' own tool, where it is installed.
fn promtool(text: &str) {
    let spawned = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut check) = spawned else {
        return;
    };
    let mut input = check.stdin.take().expect("piped");
    std::io::Write::write_all(&mut input, text.as_bytes()).expect("promtool reads");
    drop(input);
    let said = check.wait_with_output().expect("promtool ends");
    assert!(said.status.success() && said.stderr.is_empty(), "{said:?}");
}
