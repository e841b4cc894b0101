//! Request ids on every path, and the access log line of each request.

use std::sync::Arc;

use http::{HeaderName, HeaderValue, Method};
use http_body_util::BodyExt;
use serde_json::Value;

use crate::support::{
    Client, FakeWorker, GOOD, Process, Raw, Reply, config, post, request, router,
};

const ID: HeaderName = HeaderName::from_static("x-request-id");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_id_is_the_clients_or_a_new_one_on_both_sides() {
    let mut worker = FakeWorker::plain().await;
    let router = router(config(), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for sent_as in ["x-request-id", "x-correlation-id"] {
        let mut request = post("/generate", "{}");
        request.headers_mut().insert(sent_as, HeaderValue::from_static("mine-1"));
        let answer = client.call(request).await.expect("a whole response");
        assert_eq!(answer.headers[ID], "mine-1");
        assert_eq!(worker.request().await.head.headers[ID], "mine-1");
    }
    let made = client.post("/generate", "{}").await.headers[ID].clone();
    assert_eq!(worker.request().await.head.headers[ID], made);
    for (method, path) in [
        (Method::GET, "/health"),
        (Method::GET, "/nothing"),
        (Method::GET, "/generate"),
        (Method::GET, "/workers"),
    ] {
        let mut request = request(method, path, "");
        request.headers_mut().insert(ID, HeaderValue::from_static("mine-2"));
        let answer = client.call(request).await.expect("a whole response");
        assert_eq!(answer.headers[ID], "mine-2", "{path}");
    }
}

async fn json_line(process: &mut Process) -> Value {
    serde_json::from_str(&process.line_with("\"request\"").await).expect("one JSON object a line")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn access_log_has_one_line_for_each_request() {
    let mut worker = FakeWorker::start(|seen| match &seen.body[..] {
        b"hang" => Reply::Hang,
        b"endless" => Reply::Endless(Arc::default()),
        _ => Reply::good(),
    })
    .await;
    let url = worker.url();
    let arguments = ["--port", "0", "--access-log", "--log-json", "--worker-urls", &url];
    let mut process = Process::start(&arguments);
    let address = process.address().await;
    let mut client = Client::connect(address).await;
    assert_eq!(client.post("/generate", "{}").await.status, 200);
    let line = json_line(&mut process).await;
    assert_eq!(line["status"], 200, "{line}");
    assert_eq!((&line["end"], &line["endpoint"]), (&"complete".into(), &"generate".into()));
    assert_eq!((&line["attempts"], &line["bytes"]), (&1.into(), &(GOOD.len().into())), "{line}");
    assert_eq!(line["worker"], url, "{line}");
    assert!(line["reason"].is_string() && line["client"].is_string(), "{line}");
    assert!(line["first_byte_ms"].as_f64() <= line["total_ms"].as_f64(), "{line}");
    assert_eq!(line["request_id"].as_str().map(str::len), Some(36), "{line}");

    assert_eq!(client.get("/nothing").await.status, 404);
    let line = json_line(&mut process).await;
    assert_eq!((&line["status"], &line["attempts"]), (&404.into(), &0.into()), "{line}");
    assert_eq!(line["endpoint"], "router", "{line}");

    let whole = "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n\r\nhang";
    let raw = Raw::send(address, whole.as_bytes()).await;
    while worker.request().await.body != "hang" {}
    drop(raw);
    let line = json_line(&mut process).await;
    assert_eq!((&line["status"], &line["end"]), (&499.into(), &"client_gone".into()), "{line}");

    let response = client.send(post("/generate", "endless")).await.expect("a head");
    worker.kill().await;
    response.into_body().collect().await.expect_err("cut off");
    let line = json_line(&mut process).await;
    assert_eq!((&line["status"], &line["end"]), (&200.into(), &"error".into()), "{line}");
}
