//! A response with status 200 that is no answer never reaches the client.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body_util::BodyExt;
use mla_router::{Config, config::PolicyName, fleet::BreakerState};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use crate::support::{
    Client, FakeWorker, GOOD, Reply, assert_nothing_reserved, config, post, router, secs,
};

const PATH: &str = "/v1/chat/completions";
const BODY: &str = r#"{"messages":[{"role":"user","content":"hello"}]}"#;
const STREAM: &str = r#"{"messages":[{"role":"user","content":"hello"}],"stream":true}"#;
const EVENT: &[u8] = b"data: {\"choices\":[1]}\n\n";

fn in_turn() -> Config {
    Config { policy: PolicyName::RoundRobin, health_check_interval_secs: secs(3600.0), ..config() }
}

fn typed(content_type: &'static str, body: &'static [u8]) -> Reply {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    Reply::Whole(StatusCode::OK, headers, Bytes::from_static(body))
}

/// Responses to one request: garbage from one worker, then a good response from another.
async fn retried(body: &'static str, garbage: fn() -> Reply, good: &'static [u8]) {
    let mut bad = FakeWorker::start(move |_| garbage()).await;
    let fine = FakeWorker::start(move |_| Reply::ok(good)).await;
    let router = router(in_turn(), &[&bad, &fine]).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, body).await;
    assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, good));
    assert_eq!(bad.requests_so_far(), 1);
    assert_eq!(router.router().metrics.retries.total(), 1);
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn non_json_200_is_retried() {
    let garbage: [fn() -> Reply; 10] = [
        || Reply::ok(""),
        || Reply::ok("<html>It works!</html>"),
        || Reply::ok("{\"choices\":[{\"text\":\"abc"),
        || Reply::ok("[1,2]"),
        || Reply::ok("{\"hello\":\"world\"}"),
        || Reply::ok("{\"choices\":null}"),
        || Reply::ok("{\"text\":\"another API's\"}"),
        || Reply::ok(EVENT),
        || Reply::Broken(vec![]),
        || Reply::Broken(vec![Bytes::from_static(b"{\"choices\":"), Bytes::from_static(b"[")]),
    ];
    for garbage in garbage {
        retried(BODY, garbage, b"{\"choices\":[1]}").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn non_event_stream_200_is_retried() {
    let garbage: [fn() -> Reply; 7] = [
        || Reply::ok(""),
        || Reply::ok("<html>It works!</html>"),
        || Reply::ok("{\"choices\":[]}"),
        || typed("text/html", EVENT),
        || Reply::ok("data: {\"hello\":\"world\"}\n\n"),
        || Reply::ok(":mla 0 1\ndata: {\"choices\":[1\n\n"),
        || Reply::Broken(vec![]),
    ];
    for garbage in garbage {
        retried(STREAM, garbage, EVENT).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_formats_are_forwarded() {
    let worker = FakeWorker::start(|_| typed("text/plain", b"as it is")).await;
    let router = router(in_turn(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for (path, body) in [("/v1/embeddings", "{\"input\":\"x\"}"), (PATH, "not JSON"), (PATH, "{}")]
    {
        let answer = client.post(path, body).await;
        assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, &b"as it is"[..]), "{body}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_garbage_is_a_502() {
    let worker = FakeWorker::start(|_| Reply::ok("garbage")).await;
    let router = router(in_turn(), &[&worker]).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
    assert_eq!(answer.status, StatusCode::BAD_GATEWAY);
    assert_eq!(answer.error_code(), "workers_failed");
    assert_nothing_reserved(&router).await;
}

/// A response that is too long to be read at once is passed through completely.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answer_larger_than_the_buffer_arrives_complete() {
    let long = format!("{{\"text\":\"{}\"}}", "long ".repeat(4 << 20));
    let worker = {
        let long = Bytes::from(long.clone());
        FakeWorker::start(move |_| Reply::ok(long.clone())).await
    };
    let router = router(in_turn(), &[&worker]).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
    assert!(answer.body == long, "{} of {} bytes", answer.body.len(), long.len());
    assert_nothing_reserved(&router).await;
}

/// A worker that sends these bytes to any request and closes the connection.
async fn raw_worker(bytes: &'static [u8]) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.expect("a listening socket");
            tokio::spawn(async move {
                let mut request = vec![0; 4096];
                let read = stream.read(&mut request).await.unwrap_or(0);
                let is_check = request[..read].starts_with(b"GET");
                let good = &b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"[..];
                // The router may have closed it already.
                let _sent = stream.write_all(if is_check { good } else { bytes }).await;
            });
        }
    });
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn non_http_response_is_retried() {
    for bytes in [
        &b"\x00\x01\x02 what?\r\n\r\n"[..],
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1x\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"cut\":",
        b"HTTP/1.1 200 OK\r\n",
    ] {
        let fine = FakeWorker::plain().await;
        let mut config = in_turn();
        config.worker_urls.push(raw_worker(bytes).await.parse().expect("a URL"));
        let router = router(config, &[&fine]).await;
        let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
        let sent = String::from_utf8_lossy(bytes);
        assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, GOOD.as_bytes()), "{sent}");
        assert_nothing_reserved(&router).await;
    }
}

/// A stream whose first event is torn at any byte is accepted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fragmented_first_event_is_accepted() {
    let worker = FakeWorker::start(|_| {
        let (frames, source) = tokio::sync::mpsc::unbounded_channel();
        for byte in EVENT {
            frames.send(Bytes::copy_from_slice(&[*byte])).expect("open");
        }
        Reply::Frames(source)
    })
    .await;
    let router = router(in_turn(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let response = client.send(post(PATH, STREAM)).await.expect("a head");
    assert_eq!(response.status(), StatusCode::OK);
    let body = response.into_body().collect().await.expect("a whole body").to_bytes();
    assert_eq!(&body[..], EVENT);
}

/// Engines with lax booleans stream in this case, strict ones refuse the request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn non_boolean_stream_field_is_forwarded() {
    type Case = (fn() -> Reply, StatusCode, &'static [u8]);
    const WHOLE: &[u8] = b"data: {\"a\":1}\n\ndata: [DONE]\n\n";
    let cases: [Case; 3] = [
        (|| typed("text/event-stream", WHOLE), StatusCode::OK, WHOLE),
        (|| typed("application/json", b"{}"), StatusCode::OK, b"{}"),
        (|| Reply::status(422), StatusCode::UNPROCESSABLE_ENTITY, b"{\"from\":\"worker\"}"),
    ];
    for (reply, status, body) in cases {
        let mut worker = FakeWorker::start(move |_| reply()).await;
        let router = router(in_turn(), &[&worker]).await;
        let mut client = Client::connect(router.local_addr()).await;
        for stream in ["1", "0", "\"true\"", "[]"] {
            let sent = format!(r#"{{"messages":[],"stream":{stream}}}"#);
            let answer = client.post(PATH, sent).await;
            assert_eq!((answer.status, &answer.body[..]), (status, body), "{stream}");
            assert_eq!(worker.requests_so_far(), 1, "{stream}");
        }
        assert_eq!(router.workers()[0].breaker, BreakerState::Closed);
        assert_nothing_reserved(&router).await;
    }
}
