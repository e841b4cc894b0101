//! A worker that is added over HTTP must lie in an allowed network. Workers of the operator may be anywhere.

use http::StatusCode;
use mla_router::Config;
use serde_json::json;

use crate::support::{Client, FakeWorker, config, router_without_waiting};

fn within(network: &str) -> Config {
    Config { worker_networks: vec![network.parse().expect("a network")], ..config() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_cannot_register_arbitrary_addresses() {
    let router = router_without_waiting(config(), &[]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for url in [
        "http://169.254.169.254",
        "http://[::ffff:169.254.169.254]:80",
        "http://2852039166",
        "http://0.0.0.0:8000",
        "http://[::]:8000",
        "http://8.8.8.8",
        "http://224.0.0.1",
        "http://no-such-host.invalid:8000",
    ] {
        let answers = [
            client.post("/workers", json!({ "url": url }).to_string()).await,
            client.post(&format!("/add_worker?url={url}"), "").await,
        ];
        for answer in answers {
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{url}: {:?}", answer.body);
            assert_eq!(answer.json()["error"]["param"], "url");
        }
    }
    assert_eq!(router.workers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_configured_networks_are_allowed() {
    let worker = FakeWorker::plain().await;
    let body = json!({ "url": worker.url() }).to_string();
    for (network, status) in
        [("10.0.0.0/8", StatusCode::BAD_REQUEST), ("127.0.0.0/8", StatusCode::ACCEPTED)]
    {
        let router = router_without_waiting(within(network), &[]).await;
        let answer =
            Client::connect(router.local_addr()).await.post("/workers", body.clone()).await;
        assert_eq!(answer.status, status, "{network}: {:?}", answer.body);
        if status.is_client_error() {
            assert_eq!(worker.checks(), (0, 0), "it was called all the same");
            assert!(String::from_utf8_lossy(&answer.body).contains("--worker-networks"));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_urls_of_the_operator_are_trusted() {
    let worker = FakeWorker::plain().await;
    let _router = crate::support::router(within("10.0.0.0/8"), &[&worker]).await;
}
