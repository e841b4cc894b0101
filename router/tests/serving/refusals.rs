//! Requests that the router refuses, in OpenAI's error shape, and requests that it leaves to the worker.

use std::time::Duration;

use http::{Method, StatusCode};
use http_body_util::{BodyExt, channel::Channel};
use mla_router::Config;

use crate::support::{
    Client, FakeWorker, assert_nothing_reserved, config, post, request, router, soon,
};

fn with_limit(max_payload_size: usize) -> Config {
    Config { max_payload_size, ..config() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn body_above_the_limit_is_a_413_in_any_framing() {
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
    for path in ["/", "/nothing", "/v2/chat/completions", "/workers/1/x", "/v1/x"] {
        let answer = client.get(path).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{path}");
        assert_eq!(answer.error_code(), "unknown_path");
        let expected = format!("unknown path: {path}; /docs lists the paths");
        assert_eq!(answer.json()["error"]["message"], expected);
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
async fn invalid_json_is_forwarded_to_the_worker() {
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
async fn bodies_above_the_total_limit_are_refused_and_release_their_memory() {
    let worker = FakeWorker::plain().await;
    let router = router(with_limit(1 << 20), &[&worker]).await;
    let bodies = &router.router().bodies;
    let mut uploads = Vec::new();
    // Each is within --max-payload-size, all of them beyond four times as much.
    let refused = loop {
        let (mut upload, source) = Channel::new(1);
        let request = post("/generate", "").map(|_| source.boxed());
        let mut client = Client::connect(router.local_addr()).await;
        let before = bodies.held();
        let answering = tokio::spawn(async move { client.call(request).await });
        for _ in 0..2 {
            // The router may refuse before it has read all.
            let _sent = upload.send_data(vec![b'x'; 500_000].into()).await;
        }
        while bodies.held() < before + 1_000_000 && !answering.is_finished() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if answering.is_finished() {
            break answering.await.expect("no panic").expect("an answer");
        }
        uploads.push((upload, answering));
    };
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.error_code(), "bodies_too_large");
    assert!((2..=4).contains(&uploads.len()), "{}", uploads.len());
    for (upload, answering) in uploads {
        drop(upload);
        let answer = soon(answering).await.expect("no panic").expect("an answer");
        assert_eq!(answer.status, StatusCode::OK);
    }
    assert_nothing_reserved(&router).await;
    assert_eq!(bodies.held(), 0);
}
