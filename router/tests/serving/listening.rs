//! The listening socket: addresses, keys, and the limit on connections.

use std::{
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use http::{Method, StatusCode};
use http_body_util::BodyExt;
use mla_router::Config;
use tokio::{net::TcpStream, sync::Semaphore, task::JoinSet, time::timeout};

use crate::support::{
    Client, Event, FakeWorker, Process, Reply, config, post, request, router, run, soon,
};

const EXPOSED: &str = "every client that can reach";

#[test]
fn public_address_needs_a_key() {
    for host in ["0.0.0.0", "::", "::ffff:0.0.0.0"] {
        let output = run(&["--port", "0", "--host", host], &[]);
        assert_eq!(output.status.code(), Some(1), "{host}");
        let message = String::from_utf8(output.stderr).expect("text");
        assert_eq!(message.lines().count(), 1, "{message}");
        for mend in [EXPOSED, host, "--api-key", "127.0.0.1", "--insecure"] {
            assert!(message.contains(mend), "{message}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_or_insecure_flag_allows_a_public_address() {
    let key = ["--api-key", "sesame"];
    for (arguments, variables) in [
        (&["--host", "0.0.0.0", "--insecure"][..], &[][..]),
        (&["--host", "0.0.0.0", key[0], key[1]], &[]),
        (&["--host", "0.0.0.0"], &[("MLA_ROUTER_API_KEY", "sesame")]),
        (&["--host", "localhost"], &[]),
        (&["--host", "127.9.9.9"], &[]),
    ] {
        let arguments = [&["--port", "0"], arguments].concat();
        let mut process = Process::start_with(&arguments, variables);
        let insecure = arguments.contains(&"--insecure");
        if insecure {
            process.line_with(EXPOSED).await;
        }
        let mut address = process.address().await;
        if address.ip().is_unspecified() {
            address.set_ip(Ipv4Addr::LOCALHOST.into());
        }
        let alive = Client::connect(address).await.get("/liveness").await;
        assert_eq!(alive.status, StatusCode::OK, "{arguments:?}");
        let mut client = Client::connect(address).await;
        let keyed = arguments.contains(&"--api-key") || !variables.is_empty();
        let closed = client.get("/workers").await.status == StatusCode::UNAUTHORIZED;
        assert_eq!(closed, keyed, "{arguments:?}");
        let argv = std::fs::read(format!("/proc/{}/cmdline", process.id())).expect("Linux");
        let shown = argv.windows(6).any(|part| part == b"sesame");
        assert_eq!(shown, arguments.contains(&"--api-key"), "the environment does not show");
    }
}

#[test]
fn help_does_not_show_the_keys_of_the_environment() {
    let keys = [("MLA_ROUTER_API_KEY", "sesame"), ("MLA_ROUTER_ADMIN_API_KEY", "caliph")];
    let output = run(&["--help"], &keys);
    let help = String::from_utf8(output.stdout).expect("text");
    assert!(help.contains("MLA_ROUTER_API_KEY"), "{help}");
    assert!(!help.contains("sesame") && !help.contains("caliph"), "{help}");
    let output = run(&["--port", "0"], &[("MLA_ROUTER_API_KEY", "open sesame")]);
    let message = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("--api-key"), "{message}");
}

/// Probes and operators are answered under any load of clients, and idle clients do not block other clients.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn light_requests_are_answered_at_the_connection_limit() {
    let mut worker = FakeWorker::start(|seen| match seen.head.uri.path() {
        "/v1/models" => Reply::good(),
        _ => Reply::Hang,
    })
    .await;
    let router = router(Config { max_connections: 2, ..config() }, &[&worker]).await;
    let address = router.local_addr();
    let busy = [(); 2].map(|()| {
        tokio::spawn(async move { Client::connect(address).await.post("/generate", "{}").await })
    });
    for _ in &busy {
        worker.request().await;
    }
    for path in ["/health", "/readiness", "/metrics", "/workers", "/v1/models"] {
        let mut client = Client::connect(address).await;
        let answer = soon(client.get(path)).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}");
        assert_eq!(answer.headers["connection"], "close", "{path}");
    }
    let answer = soon(Client::connect(address).await.call(post("/generate", "{}"))).await;
    let answer = answer.expect("a whole response");
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.error_code(), "too_many_connections");
    assert_eq!(answer.headers["retry-after"], "1");
    let [gone, busy] = busy;
    gone.abort();
    // Idle connections are closed for a client with a request.
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(TcpStream::connect(address).await.expect("the kernel accepts"));
    }
    let mut client = Client::connect(address).await;
    assert_eq!(soon(client.get("/health")).await.status, StatusCode::OK);
    let served = async {
        loop {
            let mut client = Client::connect(address).await;
            let sent = tokio::spawn(async move { client.post("/generate", "{}").await });
            if let Ok(Event::Request(_)) = timeout(Duration::from_secs(1), worker.event()).await {
                break sent.abort();
            }
        }
    };
    soon(served).await;
    busy.abort();
}

#[tokio::test]
async fn few_open_files_are_a_warning_with_the_mend() {
    let mut process = Process::start_after("ulimit -n 64", &["--port", "0"]);
    let line = process.line_with("by the limit of 64 open files").await;
    assert!(line.contains("WARN") && line.contains("ulimit -n"), "{line}");
}

/// File descriptors for workers and health checks are reserved.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn low_file_limit_fails_no_request() {
    let worker = FakeWorker::plain().await;
    let arguments = ["--port", "0", "--worker-urls", &worker.url()];
    let mut process = Process::start_after("ulimit -n 64", &arguments);
    let address = process.address().await;
    process.line_with("is up").await;
    let mut idle = Vec::new();
    for _ in 0..60 {
        idle.push(TcpStream::connect(address).await.expect("the kernel accepts"));
    }
    let mut asking = JoinSet::new();
    for _ in 0..200 {
        asking.spawn(async move {
            let answer = Client::connect(address).await.call(post("/generate", "{}")).await;
            answer.expect("a whole response").status
        });
    }
    let mut probe = Client::connect(address).await;
    assert_eq!(soon(probe.get("/health")).await.status, StatusCode::OK);
    let mut served = 0;
    while let Some(status) = soon(asking.join_next()).await {
        let status = status.expect("no panic");
        assert!([200, 429].contains(&status.as_u16()), "{status}");
        served += usize::from(status == StatusCode::OK);
    }
    assert!(served > 10, "{served} of 200");
    drop(idle);
    let mut late = Client::connect(address).await;
    assert_eq!(soon(late.post("/generate", "{}")).await.status, StatusCode::OK);
}

/// A new router takes over the port while clients stream and new clients connect. No client is refused, and no stream
/// is cut.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_router_takes_over_the_port() {
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let worker = FakeWorker::start(move |seen| match &seen.body[..] {
        b"long" => Reply::When(Arc::clone(&held)),
        _ => Reply::good(),
    })
    .await;
    let url = worker.url();
    let mut old = Process::start(&["--port", "0", "--reuse-port", "--worker-urls", &url]);
    let address = old.address().await;
    old.line_with("is up").await;
    let long: Vec<_> = (0..20)
        .map(|_| {
            tokio::spawn(
                async move { Client::connect(address).await.post("/generate", "long").await },
            )
        })
        .collect();
    let stop = Arc::new(AtomicBool::new(false));
    let served: Arc<[AtomicU32; 4]> = Arc::default();
    let short: Vec<_> = (0..served.len())
        .map(|number| {
            let (stop, served) = (Arc::clone(&stop), Arc::clone(&served));
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let answer = Client::connect(address).await.post("/generate", "short").await;
                    assert_eq!(answer.status, StatusCode::OK);
                    served[number].fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let in_flight = async {
        loop {
            let metrics = Client::connect(address).await.get("/metrics").await.body;
            let text = String::from_utf8(metrics.into()).expect("text");
            let line = text.lines().find(|line| line.starts_with("mla_router_requests_in_flight "));
            let now = line.and_then(|line| line.split(' ').nth(1)?.parse::<u32>().ok());
            if now.expect("a gauge") >= 20 {
                break;
            }
        }
    };
    soon(in_flight).await;
    let mut kept = Client::connect(address).await;
    assert_eq!(kept.post("/generate", "short").await.status, StatusCode::OK);
    let port = address.port().to_string();
    let mut new = Process::start(&["--port", &port, "--reuse-port", "--worker-urls", &url]);
    new.line_with("is up").await;
    // All clients of the old router have sent their requests.
    let before = served.each_ref().map(|served| served.load(Ordering::Relaxed));
    let since = async {
        while served.iter().zip(before).any(|(now, before)| now.load(Ordering::Relaxed) == before) {
            tokio::task::yield_now().await;
        }
    };
    soon(since).await;
    old.terminate();
    old.line_with("handing over").await;
    for _ in 0..50 {
        let answer = Client::connect(address).await.post("/generate", "short").await;
        assert_eq!(answer.status, StatusCode::OK);
    }
    // The old router answers a request on a connection that it has, and closes it.
    let last = kept.post("/generate", "short").await;
    assert_eq!(last.status, StatusCode::OK);
    assert_eq!(last.headers["connection"], "close");
    gate.add_permits(long.len());
    for answer in long {
        assert_eq!(soon(answer).await.expect("not cut").status, StatusCode::OK);
    }
    assert_eq!(old.exit_code().await, Some(0));
    stop.store(true, Ordering::Relaxed);
    for client in short {
        soon(client).await.expect("nobody was refused");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invented_paths_and_models_make_no_new_series() {
    let worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let strange = |number: u32| {
        let method = Method::from_bytes(format!("M{number}").as_bytes()).expect("a token");
        let mut request = request(method, &format!("/v1/{number}?{number}"), "");
        let id = format!("id-{number}").parse().expect("a value");
        request.headers_mut().insert("x-request-id", id);
        request
    };
    assert_eq!(client.get("/liveness").await.status, StatusCode::OK);
    let mut series = Vec::new();
    for round in 0..2 {
        for number in 0..500 {
            let answer = client.call(strange(round * 1000 + number)).await.expect("an answer");
            assert_eq!(answer.status, StatusCode::NOT_FOUND);
            let body = format!("{{\"model\":\"m{round}-{number}\",\"prompt\":\"x\"}}");
            let path = if number % 2 == 0 { "/v1/completions" } else { "/generate" };
            assert_eq!(client.post(path, body).await.status, StatusCode::OK);
            assert_eq!(client.get(&format!("/{round}/{number}")).await.status, 404);
        }
        let page = client.call(request(Method::GET, "/metrics", "")).await.expect("a page").body;
        let page = String::from_utf8(page.into()).expect("text");
        let names = page.lines().filter_map(|line| line.rsplit_once(' '));
        series.push(
            names.map(|(name, _)| name.to_owned()).collect::<std::collections::BTreeSet<_>>(),
        );
    }
    let new: Vec<_> = series[1].difference(&series[0]).collect();
    assert!(new.is_empty(), "{new:?}");
}

/// A second SIGTERM ends the drain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_sigterm_stops_at_once() {
    let mut worker = FakeWorker::start(|_| Reply::Endless(Arc::default())).await;
    let url = worker.url();
    let far = ["--shutdown-grace-period-secs", "3600"];
    let mut process = Process::start(&[&["--port", "0", "--worker-urls", &url], &far[..]].concat());
    let address = process.address().await;
    let mut client = Client::connect(address).await;
    let response = client.send(post("/generate", "{}")).await.expect("a head");
    worker.request().await;
    process.terminate();
    process.line_with("draining").await;
    let mut prober = Client::connect(address).await;
    assert_eq!(prober.get("/readiness").await.status, StatusCode::SERVICE_UNAVAILABLE);
    process.terminate();
    assert_eq!(process.exit_code().await, Some(0));
    response.into_body().collect().await.expect_err("cut off");
}
