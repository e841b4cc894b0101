//! Connections of clients: requests in any pieces, and every form of request and response that HTTP/1.1 allows.

use std::time::Duration;

use http::StatusCode;
use mla_router::{Config, RouterHandle};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::support::{
    Client, Event, FakeWorker, Raw, Reply, assert_nothing_reserved, config, request, router, secs,
    soon,
};

const CONTINUE: &str = "HTTP/1.1 100 Continue\r\n\r\n";

async fn connect(router: &RouterHandle) -> TcpStream {
    let stream = TcpStream::connect(router.local_addr()).await.expect("the router listens");
    stream.set_nodelay(true).expect("a TCP socket");
    stream
}

async fn send(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.expect("the router reads");
}

/// Reads a response with a length. Returns its head and its body.
async fn answer(stream: &mut TcpStream) -> (String, String) {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.expect("a length").parse().expect("a number");
            assert!(body.len() <= length, "bytes behind the response: {text}");
            if body.len() == length {
                return (head.to_owned(), body.to_owned());
            }
        }
        assert_ne!(soon(stream.read_buf(&mut bytes)).await.expect("open"), 0, "closed: {bytes:?}");
    }
}

fn echo(seen: &crate::support::Seen) -> Reply {
    Reply::ok(seen.body.clone())
}

/// The clock is paused, so the router has read each byte before the next one is sent.
#[tokio::test(start_paused = true)]
async fn requests_are_read_in_single_bytes() {
    let worker = FakeWorker::start(echo).await;
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[&worker]).await;
    let mut stream = connect(&router).await;
    let head = "POST /generate HTTP/1.1\r\nhost: x\r\n";
    for rest in [
        "content-length: 5\r\n\r\nhello",
        "content-length: 5\r\nconnection: keep-alive\r\n\r\nhello",
        "transfer-encoding: chunked\r\n\r\n2;a=b\r\nhe\r\n03\r\nllo\r\n0\r\nx: y\r\n\r\n",
    ] {
        for byte in format!("{head}{rest}").as_bytes() {
            stream.write_all(&[*byte]).await.expect("the router reads");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let (head, body) = answer(&mut stream).await;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert_eq!(body, "hello");
        assert_eq!(head.contains("connection: close"), rest.starts_with("transfer"), "{head}");
    }
    assert_eq!(soon(stream.read(&mut [0])).await.expect("no reset"), 0, "closed");
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_is_asked_to_continue_before_its_body_is_read() {
    let worker = FakeWorker::start(echo).await;
    let config = Config { max_payload_size: 100, ..config() };
    let router = router(config, &[&worker]).await;
    let head = "POST /generate HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n";
    for (framing, body) in
        [("content-length: 5", "hello"), ("transfer-encoding: chunked", "5\r\nhello\r\n0\r\n\r\n")]
    {
        let mut stream = connect(&router).await;
        send(&mut stream, &format!("{head}{framing}\r\n\r\n")).await;
        let mut interim = [0; CONTINUE.len()];
        soon(stream.read_exact(&mut interim)).await.expect("an interim response");
        assert_eq!(interim, CONTINUE.as_bytes());
        send(&mut stream, body).await;
        assert_eq!(answer(&mut stream).await.1, "hello", "{framing}");
    }
    // No need to wait for a body that is here or will not be read.
    for (rest, status) in [
        ("connection: close\r\ncontent-length: 5\r\n\r\nhello", "HTTP/1.1 200"),
        ("content-length: 101\r\n\r\n", "HTTP/1.1 413"),
    ] {
        let raw = Raw::send(router.local_addr(), format!("{head}{rest}").as_bytes()).await;
        let answer = raw.read_to_close().await;
        assert!(answer.starts_with(status), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_over_the_limit_are_refused_in_any_framing() {
    let mut worker = FakeWorker::plain().await;
    let config = Config { max_payload_size: 100, ..config() };
    let router = router(config, &[&worker]).await;
    let head = "POST /generate HTTP/1.1\r\nhost: x\r\n";
    let part = "x".repeat(60);
    for body in [
        format!("content-length: 101\r\n\r\n{part}"),
        format!("transfer-encoding: chunked\r\n\r\n3c\r\n{part}\r\n3c\r\n{part}\r\n"),
    ] {
        let raw = Raw::send(router.local_addr(), format!("{head}{body}").as_bytes()).await;
        let answer = raw.read_to_close().await;
        assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
    }
    assert_eq!(worker.requests_so_far(), 0);
}

/// A connection stays open after an error, unless the rest of a body would have to be skipped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_body_does_not_become_a_request() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let smuggled = "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}";
    let head =
        format!("PUT /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}", smuggled.len());
    let mut stream = connect(&router).await;
    for _ in 0..2 {
        send(&mut stream, &format!("{head}\r\n\r\n{smuggled}")).await;
        let (head, _) = answer(&mut stream).await;
        assert!(head.starts_with("HTTP/1.1 405") && !head.contains("close"), "{head}");
    }
    send(&mut stream, &format!("{head}\r\n\r\n{}", &smuggled[..10])).await;
    let (head, _) = answer(&mut stream).await;
    assert!(head.starts_with("HTTP/1.1 405") && head.contains("connection: close"), "{head}");
    send(&mut stream, smuggled).await;
    let mut rest = Vec::new();
    let _ended = soon(stream.read_to_end(&mut rest)).await;
    assert_eq!((rest, worker.requests_so_far()), (Vec::new(), 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_ends_its_side_before_the_response_is_gone() {
    let mut worker = FakeWorker::start(|_| Reply::Hang).await;
    let router = router(config(), &[&worker]).await;
    let mut stream = connect(&router).await;
    send(&mut stream, "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}").await;
    worker.request().await;
    stream.shutdown().await.expect("open");
    assert!(matches!(worker.event().await, Event::Aborted));
    assert_eq!(soon(stream.read(&mut [0])).await.expect("no reset"), 0, "closed");
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn body_that_ends_early_is_a_400() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    for body in ["content-length: 5\r\n\r\n{}", "transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"] {
        let mut stream = connect(&router).await;
        send(&mut stream, &format!("POST /generate HTTP/1.1\r\nhost: x\r\n{body}")).await;
        stream.shutdown().await.expect("open");
        let mut text = String::new();
        soon(stream.read_to_string(&mut text)).await.expect("text");
        assert!(text.starts_with("HTTP/1.1 400") && text.contains("bad_body"), "{text}");
    }
    assert_eq!(worker.requests_so_far(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_clients_get_the_old_version_without_chunks() {
    let worker = FakeWorker::start(|seen| {
        if seen.body == "stream" {
            let frames = [&b"data: {\"choices\":[1]}\n\n"[..], b"data: [DONE]\n\n"];
            let frames = frames.map(bytes::Bytes::from_static).to_vec();
            return Reply::Stream(http::HeaderMap::new(), frames, crate::support::Then::End);
        }
        echo(seen)
    })
    .await;
    let router = router(config(), &[&worker]).await;
    let message = |body: &str, fields: &str| {
        let length = body.len();
        format!("POST /generate HTTP/1.0\r\ncontent-length: {length}\r\n{fields}\r\n{body}")
    };
    let mut stream = connect(&router).await;
    send(&mut stream, &message("hello", "connection: keep-alive\r\n")).await;
    let (head, body) = answer(&mut stream).await;
    assert!(head.starts_with("HTTP/1.0 200") && head.contains("connection: keep-alive"), "{head}");
    assert_eq!(body, "hello");
    send(&mut stream, &message("stream", "connection: keep-alive\r\n")).await;
    let mut text = String::new();
    soon(stream.read_to_string(&mut text)).await.expect("text");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    assert!(head.contains("connection: close") && !head.contains("chunked"), "{head}");
    assert_eq!(body, "data: {\"choices\":[1]}\n\ndata: [DONE]\n\n");
    let raw = Raw::send(router.local_addr(), message("hello", "").as_bytes()).await;
    assert!(raw.read_to_close().await.ends_with("\r\n\r\nhello"), "closed without keep-alive");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn response_to_head_has_no_body() {
    let router = router(config(), &[]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..2 {
        let head = client.call(request(http::Method::HEAD, "/liveness", "")).await;
        let head = head.expect("a whole response");
        assert_eq!((head.status, &head.body[..]), (StatusCode::OK, &b""[..]));
        let whole = client.get("/liveness").await;
        assert_eq!(head.headers["content-length"], whole.body.len().to_string().as_str());
    }
}
