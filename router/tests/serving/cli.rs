//! The `mla-router` command as a process.

use std::{process::Command, sync::Arc};

use http::StatusCode;
use http_body_util::BodyExt;

use crate::support::{Client, FakeWorker, Folder, Process, Reply, post, run};

#[test]
fn occupied_port_is_a_one_line_error() {
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = taken.local_addr().expect("bound").port().to_string();
    let output = run(&["--port", &port], &[]);
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).expect("text");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(
        message.starts_with(&format!("error: cannot listen on 127.0.0.1:{port}: ")),
        "{message}"
    );
    assert!(message.contains("in use"), "{message}");
    assert!(message.contains("give another --port"), "{message}");
}

#[test]
fn invalid_flag_is_named_and_help_exits_with_zero() {
    for (arguments, named) in [
        (["--worker-urls", "ftp://w1"], "--worker-urls"),
        (["--policy", "magic"], "cache_aware"),
        (["--nonsense", "1"], "--nonsense"),
    ] {
        let output = run(&arguments, &[]);
        assert_eq!(output.status.code(), Some(2));
        let message = String::from_utf8(output.stderr).expect("text");
        assert!(message.contains(named), "{message}");
    }
    let output = run(&["--help"], &[]);
    assert_eq!(output.status.code(), Some(0));
    let help = String::from_utf8(output.stdout).expect("text");
    assert!(help.contains("--worker-urls") && help.contains("[default: 30000]"), "{help}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn router_prints_its_address_serves_and_stops_on_sigterm() {
    let worker = FakeWorker::plain().await;
    let mut process = Process::start(&["--port", "0", "--worker-urls", &worker.url()]);
    let address = process.address().await;
    process.line_with(&format!("worker {} is up", worker.url())).await;
    let mut client = Client::connect(address).await;
    assert_eq!(client.post("/generate", "{}").await.status, 200);
    process.terminate();
    assert_eq!(process.exit_code().await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_names_a_worker_that_answers_garbage() {
    let worker = FakeWorker::start(|_| Reply::ok("<html>")).await;
    worker.set_models(&["m\nforged"]);
    let mut process = Process::start(&["--port", "0", "--worker-urls", &worker.url()]);
    let address = process.address().await;
    process.line_with(&format!("worker {} serves m\\nforged", worker.url())).await;
    process.line_with(&format!("worker {} is up", worker.url())).await;
    let mut client = Client::connect(address).await;
    let answer = client.post("/v1/completions", r#"{"prompt":"x"}"#).await;
    assert_eq!(answer.status, StatusCode::BAD_GATEWAY);
    process.line_with(&format!("worker {}: ", worker.url())).await;
}

/// The kernel and the shell of a closed terminal send SIGHUP, each for itself. It never stops at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closed_terminal_lets_a_stream_finish() {
    let mut worker = FakeWorker::start(|_| Reply::Endless(Arc::default())).await;
    let far = ["--shutdown-grace-period-secs", "3600"];
    let mut process =
        Process::start(&[&["--port", "0", "--worker-urls", &worker.url()], &far[..]].concat());
    let address = process.address().await;
    let mut client = Client::connect(address).await;
    let mut response = client.send(post("/generate", "{}")).await.expect("a head");
    worker.request().await;
    process.signal("HUP");
    process.line_with("draining").await;
    process.signal("HUP");
    process.terminate();
    let mut prober = Client::connect(address).await;
    assert_eq!(prober.get("/readiness").await.status, StatusCode::SERVICE_UNAVAILABLE);
    response.frame().await.expect("the stream goes on").expect("a frame");
    process.terminate();
    assert_eq!(process.exit_code().await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nohup_is_heeded() {
    let mut process = Process::start_after("trap '' HUP", &["--port", "0"]);
    let address = process.address().await;
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).expect("Linux");
    let ignored = status.lines().find(|line| line.starts_with("SigIgn:")).expect("a mask");
    let mask = u64::from_str_radix(ignored["SigIgn:".len()..].trim(), 16).expect("a number");
    assert_eq!(mask & 1, 1, "SIGHUP is signal 1");
    assert_eq!(Client::connect(address).await.get("/liveness").await.status, 200);
    process.terminate();
    assert_eq!(process.exit_code().await, Some(0));
}

/// The reader of the log has gone, or the disk is full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unwritable_log_does_not_stop_serving() {
    let mut worker = FakeWorker::plain().await;
    let url = worker.url();
    let mut process = Process::start(&["--port", "0", "--access-log", "--worker-urls", &url]);
    let address = process.address().await;
    process.line_with(&format!("worker {url} is up")).await;
    process.close_log();
    let mut client = Client::connect(address).await;
    for _ in 0..3 {
        assert_eq!(client.post("/generate", "{}").await.status, 200);
    }
    // The log lines of the health checks cannot be written either.
    worker.kill().await;
    while client.get("/readiness").await.status == 200 {}
    worker.restart().await;
    assert_eq!(client.post("/generate", "{}").await.status, 200);
    process.terminate();
    assert_eq!(process.exit_code().await, Some(0));
}

/// A stopped terminal, or a stuck log collector. The lines take more than the 64 KiB of a pipe.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_reader_of_the_log_does_not_stop_serving() {
    let worker = FakeWorker::plain().await;
    let url = worker.url();
    let mut process = Process::start(&["--port", "0", "--access-log", "--worker-urls", &url]);
    let address = process.address().await;
    process.line_with(&format!("worker {url} is up")).await;
    let mut client = Client::connect(address).await;
    for _ in 0..1000 {
        assert_eq!(client.post("/generate", "{}").await.status, 200);
    }
    process.terminate();
    assert_eq!(process.exit_code().await, Some(0));
}

/// The reader of a FIFO waits for its writer, as that of a file on a network file system for its server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn file_that_cannot_be_read_does_not_delay_the_end() {
    let folder = Folder::new();
    let file = folder.path().join("workers");
    assert!(Command::new("mkfifo").arg(&file).status().expect("it exists").success());
    let name = file.to_str().expect("text");
    let mut process = Process::start(&["--port", "0", "--worker-urls-file", name]);
    process.address().await;
    process.terminate();
    assert_eq!(process.exit_code().await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sglang_router_flags_start_and_report_ignored_ones() {
    let worker = FakeWorker::plain().await;
    let mut arguments = vec!["--port", "0", "--disable-retries", "--disable-circuit-breaker"];
    arguments.extend(["--retry-initial-backoff-ms", "50", "--retry-max-backoff-ms", "30000"]);
    let ignored = [
        "--retry-backoff-multiplier",
        "--retry-jitter-factor",
        "--cb-success-threshold",
        "--cb-window-duration-secs",
        "--worker-startup-timeout-secs",
        "--worker-startup-check-interval",
        "--prometheus-port",
        "--prometheus-host",
        "--log-dir",
    ];
    for flag in ignored {
        arguments.extend([flag, "1"]);
    }
    let url = worker.url();
    arguments.extend(["--worker-urls", &url]);
    let mut process = Process::start(&arguments);
    for flag in ignored {
        process.line_with(&format!("{flag} has no effect here: ")).await;
    }
    process.line_with(&format!("worker {url} is up")).await;
    process.terminate();
    assert_eq!(process.exit_code().await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starting_worker_is_no_warning() {
    let mut worker = FakeWorker::plain().await;
    let url = worker.url();
    worker.kill().await;
    let mut process = Process::start(&["--port", "0", "--worker-urls", &url]);
    let line = process.line_with(&format!("waiting for worker {url}")).await;
    assert!(line.contains("INFO"), "{line}");
    worker.restart().await;
    process.line_with(&format!("worker {url} is up")).await;
}
