//! `/dashboard` as plain HTTP. That the page works in a browser is `make test-dashboard`.

use http::{Method, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;

use crate::support::{Client, FakeWorker, config, request, router, soon};

const FILES: [(&str, &str); 3] = [
    ("/dashboard", "text/html; charset=utf-8"),
    ("/dashboard/page.css", "text/css; charset=utf-8"),
    ("/dashboard/page.js", "text/javascript; charset=utf-8"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_is_open_and_its_data_is_not() {
    let key = "sesame".parse().expect("a key");
    let router = router(mla_router::Config { api_key: vec![key], ..config() }, &[]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for (path, kind) in FILES {
        let answer = client.get(path).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}");
        assert_eq!(answer.headers["content-type"], kind);
        assert_eq!(answer.headers["x-content-type-options"], "nosniff");
        let policy = answer.headers["content-security-policy"].to_str().expect("text");
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
    }
    assert_eq!(client.get("/dashboard/events").await.status, StatusCode::UNAUTHORIZED);
}

/// The policy would stop them; without them nobody is tempted to loosen it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_has_nothing_inline_and_nothing_from_elsewhere() {
    let router = router(config(), &[]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for (path, _) in FILES {
        let body = client.get(path).await.body;
        let text = String::from_utf8(body.to_vec()).expect("text");
        let bad =
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="];
        for word in bad.into_iter().chain(["onclick", "onload", "<style", "url(", "https://"]) {
            assert!(!text.contains(word), "{word} in {path}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_say_what_the_router_knows() {
    let workers = [FakeWorker::plain().await, FakeWorker::plain().await];
    let router = router(config(), &[&workers[0], &workers[1]]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..3 {
        client.post("/v1/chat/completions", r#"{"messages":[]}"#).await;
    }
    let answer = client.send(request(Method::GET, "/dashboard/events", "")).await.expect("events");
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    let mut body = answer.into_body();
    for _ in 0..2 {
        let frame = soon(body.frame()).await.expect("an event").expect("whole");
        let bytes = frame.into_data().expect("data");
        let event = bytes.strip_prefix(b"data: ").expect("an event");
        let stats: Value = serde_json::from_slice(event).expect("JSON");
        assert_eq!(stats["requests"]["answered"]["2xx"], 3);
        assert_eq!(stats["first_byte"]["count"], 3);
        assert_eq!(stats["workers"].as_array().expect("a list").len(), 2);
        assert_eq!(stats["workers"][1]["url"], workers[1].url());
        assert_eq!(stats["workers"][1]["phase"], "healthy");
    }
    // A reader does not hold the router up.
    assert!(soon(router.drain(std::time::Duration::from_secs(60))).await);
    while soon(body.frame()).await.is_some() {}
}
