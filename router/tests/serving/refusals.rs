//! What the router itself refuses, in OpenAI's shape; what it leaves to the worker.

use http::{HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt, channel::Channel};
use mla_router::Config;

use crate::support::{Client, FakeWorker, Raw, config, post, request, router};

fn with_limit(max_payload_size: usize) -> Config {
    Config { max_payload_size, ..config() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_above_the_limit_is_a_413_however_it_is_framed() {
    let mut worker = FakeWorker::plain().await;
    let router = router(with_limit(1000), &[&worker]).await;
    let address = router.local_addr();
    for length in [1001, 100_000] {
        let body = vec![b'x'; length];
        let answer = Client::connect(address).await.post("/generate", body).await;
        assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(answer.error_code(), "payload_too_large");
    }

    let (mut upload, source) = Channel::new(2);
    let request = post("/generate", "").map(|_| source.boxed());
    let sending = tokio::spawn(async move {
        for _ in 0..2 {
            // The router may close before it has read all.
            let _sent = upload.send_data(vec![b'x'; 600].into()).await;
        }
    });
    let answer = Client::connect(address).await.call(request).await.expect("an answer");
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
    sending.await.expect("no panic");

    let answer = Client::connect(address).await.post("/generate", vec![b'x'; 1000]).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(worker.requests_so_far(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_paths_are_404_and_wrong_methods_405() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for path in ["/", "/nothing", "/v2/chat/completions", "/workers/1"] {
        let answer = client.get(path).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{path}");
        assert_eq!(answer.error_code(), "unknown_path");
    }
    for (method, path, allow) in [
        (Method::GET, "/v1/chat/completions", "POST"),
        (Method::PUT, "/generate", "POST"),
        (Method::DELETE, "/v1/models", "GET"),
        (Method::POST, "/v1/models", "GET"),
        (Method::POST, "/list_workers", "GET"),
        (Method::GET, "/flush_cache", "POST"),
    ] {
        let answer = client.call(request(method.clone(), path, "")).await.expect("an answer");
        assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
        assert_eq!(answer.error_code(), "method_not_allowed");
        let allowed = answer.headers["allow"].to_str().expect("text");
        assert!(allowed.split(',').any(|method| method == allow), "{method} {path}: {allowed}");
    }
    assert_eq!(worker.requests_so_far(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_json_is_for_the_worker_to_judge() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for body in
        ["", "{", "[]", "null", "{\"messages\": 3}", "\u{feff}{}", "{\"prompt\":\"\\ud800\"}"]
    {
        assert_eq!(client.post("/v1/chat/completions", body).await.status, StatusCode::OK);
        assert_eq!(worker.request().await.body, body);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_key_protects_all_but_the_health_checks() {
    let mut worker = FakeWorker::plain().await;
    let config = Config { api_key: vec!["sesame".parse().expect("a key")], ..config() };
    let router = router(config, &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for path in ["/health", "/liveness", "/readiness"] {
        assert_eq!(client.get(path).await.status, StatusCode::OK);
    }
    let protected = [
        (Method::POST, "/generate"),
        (Method::GET, "/v1/models"),
        (Method::GET, "/workers"),
        (Method::GET, "/metrics"),
        (Method::POST, "/flush_cache"),
        (Method::GET, "/nothing"),
    ];
    for (method, path) in protected {
        for key in
            [None, Some("sesam"), Some("Bearer sesamf"), Some("Bearer "), Some("Basic sesame")]
        {
            let mut request = request(method.clone(), path, "");
            if let Some(key) = key {
                request.headers_mut().insert("authorization", HeaderValue::from_static(key));
            }
            let answer = client.call(request).await.expect("an answer");
            assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{path} with {key:?}");
            assert_eq!(answer.error_code(), "invalid_api_key");
        }
    }
    assert_eq!(worker.requests_so_far(), 0);
    let mut request = post("/generate", "{}");
    let key = HeaderValue::from_static("Bearer sesame");
    request.headers_mut().insert("authorization", key.clone());
    assert_eq!(client.call(request).await.expect("an answer").status, StatusCode::OK);
    // The router's own requests to its workers carry the key, too: they were started with it.
    let mut flush = post("/flush_cache", "");
    flush.headers_mut().insert("authorization", key.clone());
    assert_eq!(client.call(flush).await.expect("an answer").status, StatusCode::OK);
    for path in ["/generate", "/flush_cache"] {
        let seen = worker.request().await;
        assert_eq!(seen.head.uri.path(), path);
        assert_eq!(seen.head.headers.get("authorization"), Some(&key));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_readings_of_one_message_are_refused() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let smuggled = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}";
    for framing in [
        "content-length: 4\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 4\r\n",
        "Content-Length: 4\r\nTransfer-Encoding : chunked\r\n",
        "content-length: 4\r\ncontent-length: 5\r\n",
        "content-length: +4\r\n",
        "content-length: 4, 4\r\n",
        "transfer-encoding: chunked, identity\r\n",
        "transfer-encoding: xchunked\r\n",
    ] {
        let message =
            format!("POST /generate HTTP/1.1\r\nhost: x\r\n{framing}\r\n0\r\n\r\n{smuggled}");
        let raw = Raw::send(router.local_addr(), message.as_bytes()).await;
        let answer = raw.read_to_close().await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{framing:?}: {answer}");
        assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{framing:?}: {answer}");
        assert_eq!(worker.requests_so_far(), 0, "{framing:?}");
    }
}
