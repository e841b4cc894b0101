//! A malformed, too large or too slow message gets an error, and its connection is closed. At most one request of
//! it reaches a worker.

use std::time::Duration;

use http::StatusCode;
use mla_router::Config;
use serde_json::Value;
use tokio::time::Instant;

use crate::support::{Client, FakeWorker, Raw, config, post, router, secs};

const SMUGGLED: &str = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}";

/// Returns the only response on a connection: its status and the `code` of its error.
fn refusal(answer: &str) -> (u16, String) {
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a whole head");
    assert!(head.contains("connection: close") && head.contains("x-request-id: "), "{answer}");
    let body: Value = serde_json::from_str(body).expect("JSON");
    let status = head[9..12].parse().expect("a status");
    (status, body["error"]["code"].as_str().expect("a code").to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ambiguous_request_reaches_no_worker() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    for (lines, code) in [
        ("content-length: 4\r\ntransfer-encoding: chunked", "ambiguous_length"),
        ("transfer-encoding: chunked\r\ncontent-length: 4", "ambiguous_length"),
        ("Transfer-Encoding : chunked", "bad_head"),
        ("transfer-encoding: xchunked", "bad_head"),
        ("transfer-encoding: chunked\r\ntransfer-encoding: identity", "bad_head"),
        ("transfer-encoding:\u{b}chunked", "bad_head"),
        ("content-length: 4\r\ncontent-length: 5", "bad_head"),
        ("content-length: 4\r\ncontent-length: 4", "bad_head"),
        ("content-length: +4", "bad_head"),
        ("content_length: 4", "bad_head"),
        ("x: y\r\n transfer-encoding: chunked", "bad_head"),
        ("x: y\ntransfer-encoding: chunked", "bad_head"),
        ("x: y\rtransfer-encoding: chunked", "bad_head"),
        ("host: y", "bad_head"),
    ] {
        let message =
            format!("POST /generate HTTP/1.1\r\nhost: x\r\n{lines}\r\n\r\n0\r\n\r\n{SMUGGLED}");
        let raw = Raw::send(router.local_addr(), message.as_bytes()).await;
        assert_eq!(refusal(&raw.read_to_close().await), (400, code.to_owned()), "{lines:?}");
    }
    for head in [
        "GET /v1/models HTTP/1.1\r\n\r\n",
        "GET /v1/models HTTP/1.1\r\nhost: a/?x=\r\n\r\n",
        "GET /v1/models HTTP/1.1\nhost: a\n\n",
        "GET /v1/models\r\n\r\n",
    ] {
        let raw = Raw::send(router.local_addr(), head.as_bytes()).await;
        assert_eq!(refusal(&raw.read_to_close().await), (400, "bad_head".to_owned()), "{head:?}");
    }
    assert_eq!(worker.requests_so_far(), 0);
}

/// There is exactly one request, or a refusal. Further bytes are never taken for another request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_body_is_at_most_one_request() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let head = "POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    for (body, whole) in [
        ("2;ext=1\r\n{}\r\n0\r\n\r\n", true),
        ("2\r\n{}\r\n0\r\ntrailer: 1\r\n\r\n", true),
        ("02\r\n{}\r\n0\r\n\r\n", true),
        ("2;\nx\r\n{}\r\n0\r\n\r\n", false),
        ("2\n{}\n0\n\n", false),
        ("0x2\r\n{}\r\n0\r\n\r\n", false),
        ("-2\r\n{}\r\n0\r\n\r\n", false),
        ("2\r\n{}0\r\n\r\n", false),
        ("fffffffffffffffff\r\n{}\r\n0\r\n\r\n", false),
    ] {
        let message = format!("{head}{body}{SMUGGLED}");
        let answer = Raw::send(router.local_addr(), message.as_bytes()).await.read_to_close().await;
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{body:?}: {answer}");
        let status = if whole { "HTTP/1.1 200" } else { "HTTP/1.1 400" };
        assert!(answer.starts_with(status), "{body:?}: {answer}");
        let reached = worker.requests_so_far();
        assert_eq!(reached, usize::from(whole), "{body:?}");
    }
    let absolute = "POST http://y/generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\
                    connection: close\r\n\r\n{}";
    let answer = Raw::send(router.local_addr(), absolute.as_bytes()).await.read_to_close().await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let seen = worker.request().await;
    assert_eq!(seen.head.uri, "/generate");
    assert_eq!(seen.head.headers["host"], worker.address().to_string().as_str());
}

/// Each message is found, in order, in any segments.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelined_requests_are_answered_in_order() {
    let mut worker = FakeWorker::start(|seen| crate::support::Reply::ok(seen.body.clone())).await;
    let router = router(config(), &[&worker]).await;
    let message = |body: &str, close: &str| {
        let length = body.len();
        format!(
            "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{close}\r\n{body}"
        )
    };
    let large = "z".repeat(100_000);
    let messages = [
        message("first", ""),
        "GET /health HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(),
        message(&large, ""),
        message("fourth", "connection: close\r\n"),
    ];
    let bytes = messages.concat();
    for cut in [0, 1, messages[0].len() - 1, messages[0].len() + 3, bytes.len() - 1] {
        let mut raw = Raw::send(router.local_addr(), &bytes.as_bytes()[..cut]).await;
        // Long enough for the router to read the first part alone.
        Client::connect(router.local_addr()).await.get("/liveness").await;
        raw.send_more(&bytes.as_bytes()[cut..]).await;
        let answer = raw.read_to_close().await;
        assert_eq!(answer.matches("HTTP/1.1 200").count(), 4, "cut at {cut}");
        let places = ["first", "ok\n", large.as_str(), "fourth"].map(|body| answer.find(body));
        assert!(places.is_sorted() && places[0].is_some(), "cut at {cut}: {places:?}");
        for body in ["first", large.as_str(), "fourth"] {
            assert_eq!(worker.request().await.body, body);
        }
    }
    let mut bad = messages[0].clone();
    bad.push_str("POST /generate HTTP/1.1\r\ncontent-length: 5\r\n\r\nhello");
    let answer = Raw::send(router.local_addr(), bad.as_bytes()).await.read_to_close().await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("first"), "{answer}");
    assert!(answer.contains("HTTP/1.1 400") && answer.contains("bad_head"), "{answer}");
    assert_eq!(worker.requests_so_far(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn head_size_is_limited() {
    let router = router(config(), &[]).await;
    let long = "x".repeat(70_000);
    for (head, refused) in [
        (format!("GET /{long} HTTP/1.1\r\nhost: x\r\n\r\n"), (431, "head_too_large")),
        (format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", &long[..9000]), (414, "uri_too_long")),
        (format!("GET / HTTP/1.1\r\nhost: x\r\na: {long}\r\n\r\n"), (431, "head_too_large")),
        (
            format!("GET / HTTP/1.1\r\nhost: x\r\n{}\r\n", "a: b\r\n".repeat(100)),
            (431, "head_too_large"),
        ),
    ] {
        let raw = Raw::send(router.local_addr(), head.as_bytes()).await;
        let (status, code) = refusal(&raw.read_to_close().await);
        assert_eq!((status, code.as_str()), refused);
    }
    let head = format!(
        "GET /{} HTTP/1.1\r\nhost: x\r\nconnection: close\r\na: {}\r\n{}\r\n",
        &long[..8000],
        &long[..50_000],
        "a: b\r\n".repeat(97)
    );
    let answer = Raw::send(router.local_addr(), head.as_bytes()).await.read_to_close().await;
    assert!(answer.starts_with("HTTP/1.1 404"), "just within: {answer}");
}

/// The paused clock advances to the next timer when all tasks are idle.
#[tokio::test(start_paused = true)]
async fn incomplete_head_is_a_408_after_ten_seconds() {
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[]).await;
    let begun = Instant::now();
    let raw = Raw::send(router.local_addr(), b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ").await;
    assert_eq!(refusal(&raw.read_to_close().await), (408, "request_timeout".to_owned()));
    let waited = begun.elapsed().as_secs();
    assert!((10..20).contains(&waited), "{waited} s");
}

/// Each head has ten seconds of its own.
#[tokio::test(start_paused = true)]
async fn two_slow_heads_on_one_connection_are_answered() {
    const SLOW: Duration = Duration::from_secs(8);
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[]).await;
    let mut raw = Raw::send(router.local_addr(), b"GET /liveness HTTP/1.1\r\n").await;
    tokio::time::sleep(SLOW).await;
    raw.send_more(b"host: x\r\n\r\n").await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    raw.send_more(b"GET /liveness HTTP/1.1\r\nconnection: close\r\n").await;
    tokio::time::sleep(SLOW).await;
    raw.send_more(b"host: x\r\n\r\n").await;
    let answer = raw.read_to_close().await;
    assert_eq!(answer.matches("HTTP/1.1 200").count(), 2, "{answer}");
}

#[tokio::test(start_paused = true)]
async fn stalled_body_is_a_408_after_thirty_seconds_on_every_route() {
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[]).await;
    for (path, framing) in [
        ("/generate", "content-length: 100\r\n\r\nx"),
        ("/generate", "transfer-encoding: chunked\r\n\r\n5\r\nx"),
        ("/workers", "content-length: 100\r\n\r\nx"),
        ("/abort_request", "content-length: 100\r\n\r\n"),
    ] {
        let begun = Instant::now();
        let message = format!("POST {path} HTTP/1.1\r\nhost: x\r\n{framing}");
        let raw = Raw::send(router.local_addr(), message.as_bytes()).await;
        let refused = refusal(&raw.read_to_close().await);
        assert_eq!(refused, (408, "request_timeout".to_owned()), "{path}");
        let waited = begun.elapsed().as_secs();
        assert!((30..40).contains(&waited), "{path}: {waited} s");
    }
}

/// The limit is on a pause, not on the upload: an upload that progresses may take long.
#[tokio::test(start_paused = true)]
async fn slow_steady_upload_is_read() {
    const PART: usize = 20 * 600;
    let worker = FakeWorker::plain().await;
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[&worker]).await;
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        6 * PART
    );
    let mut raw = Raw::send(router.local_addr(), head.as_bytes()).await;
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_secs(20)).await;
        raw.send_more(&[b'x'; PART]).await;
    }
    let answer = raw.read_to_close().await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// Otherwise a client could hold a connection for ever with a byte now and then.
#[tokio::test(start_paused = true)]
async fn dripping_body_is_a_408_on_every_route() {
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[]).await;
    for (path, framing) in [
        ("/generate", "content-length: 100000\r\n\r\n"),
        ("/workers", "content-length: 100000\r\n\r\n"),
        ("/generate", "transfer-encoding: chunked\r\n\r\n10000\r\n"),
        ("/generate", "transfer-encoding: chunked\r\n\r\n"), // the size of a chunk
        ("/generate", "transfer-encoding: chunked\r\n\r\n5;"), // its extension
        ("/generate", "transfer-encoding: chunked\r\n\r\n5\r\n01234\r\n0\r\n"), // trailers
    ] {
        let begun = Instant::now();
        let message = format!("POST {path} HTTP/1.1\r\nhost: x\r\n{framing}");
        let mut raw = Raw::send(router.local_addr(), message.as_bytes()).await;
        let is_size = framing.ends_with("\r\n\r\n") && framing.starts_with("transfer");
        while begun.elapsed() < Duration::from_secs(60) {
            tokio::time::sleep(Duration::from_secs(5)).await;
            raw.send_more(if is_size { b"0" } else { b"a" }).await;
        }
        let answer = raw.read_to_close().await;
        assert_eq!(refusal(&answer), (408, "request_timeout".to_owned()), "{framing:?}");
        assert!(answer.contains("--body-min-rate"), "{answer}");
    }
}

/// A response may take longer than the limit for a pause of an upload, with any framing of the request.
#[tokio::test(start_paused = true)]
async fn waiting_for_the_response_is_not_a_slow_upload() {
    let worker = FakeWorker::start(|_| crate::support::Reply::Hang).await;
    let config = Config {
        health_check_interval_secs: secs(3600.0),
        first_token_timeout_secs: secs(200.0),
        request_timeout_secs: secs(200.0),
        ..config()
    };
    let router = router(config, &[&worker]).await;
    for framing in ["content-length: 2\r\n\r\n{}", "transfer-encoding: chunked\r\n\r\n0\r\n\r\n"] {
        let begun = Instant::now();
        let message =
            format!("POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{framing}");
        let answer = Raw::send(router.local_addr(), message.as_bytes()).await.read_to_close().await;
        assert!(answer.starts_with("HTTP/1.1 504"), "{answer}");
        assert!(begun.elapsed() >= Duration::from_secs(200), "{framing:?}");
    }
}

/// A client that is still sending can read the refusal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_arrives_during_the_upload() {
    let worker = FakeWorker::plain().await;
    let config = Config { max_payload_size: 1000, ..config() };
    let router = router(config, &[&worker]).await;
    for _ in 0..20 {
        let head = "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n";
        let mut raw = Raw::send(router.local_addr(), head.as_bytes()).await;
        raw.send_more(&vec![b'x'; 1_000_000]).await;
        assert_eq!(refusal(&raw.read_to_close().await).0, 413);
    }
    let mut client = Client::connect(router.local_addr()).await;
    let answer = client.call(post("/generate", "{}")).await.expect("a whole response");
    assert_eq!(answer.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_an_upload_and_a_stop_refuses_it() {
    let worker = FakeWorker::plain().await;
    for ends_in_time in [true, false] {
        let router = router(config(), &[&worker]).await;
        let gate = &router.router().gate;
        let head = "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{";
        let mut raw = Raw::send(router.local_addr(), head.as_bytes()).await;
        while gate.in_flight() == 0 {
            tokio::task::yield_now().await;
        }
        assert!(!router.drain(Duration::from_millis(1)).await, "the upload has begun");
        if ends_in_time {
            raw.send_more(b"}").await;
            assert!(router.drain(Duration::from_secs(60)).await);
            let answer = raw.read_to_close().await;
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        } else {
            router.stop(Duration::from_millis(1)).await;
            let refused = refusal(&raw.read_to_close().await);
            assert_eq!(refused, (503, "draining".to_owned()));
        }
    }
}
