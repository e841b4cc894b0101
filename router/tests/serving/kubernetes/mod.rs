//! Discovery in Kubernetes with a real kube-apiserver: `make test-kubernetes`.

mod cluster;

use std::{net::SocketAddr, time::Instant};

use http::StatusCode;
use http_body_util::BodyExt;
use mla_mock_worker::{MockWorker, Port, Settings};
use serde_json::Value;

use crate::support::{Client, Process, post, soon};
use cluster::Cluster;

/// The port of all pods. Each pod has its own address.
async fn pod(ip: &str, port: u16) -> MockWorker {
    let settings = Settings { decode_base_ms: 5.0, ..Settings::instant() };
    let address: SocketAddr = format!("{ip}:{port}").parse().expect("an address");
    let port = Port::at(address).expect("all of 127.0.0.0/8 is ours");
    MockWorker::listen(port, settings).await.expect("the port is ours")
}

async fn router(cluster: &Cluster, port: u16) -> (Process, Client) {
    let port = port.to_string();
    let arguments = ["--port", "0", "--service-discovery", "--selector", "app=worker"];
    let arguments = [&arguments[..], &["--service-discovery-port", &port]].concat();
    let kubeconfig = cluster.kubeconfig();
    let kubeconfig = kubeconfig.to_str().expect("a path in UTF-8");
    let mut router = Process::start_with(&arguments, &[("KUBECONFIG", kubeconfig)]);
    let address = router.address().await;
    (router, Client::connect(address).await)
}

/// Measures until the log says so.
async fn until(router: &mut Process, since: Instant, line: String) {
    router.line_with(&line).await;
    println!("{:.3} s until {line}", since.elapsed().as_secs_f64());
}

async fn urls(client: &mut Client) -> Vec<String> {
    let listed = client.get("/list_workers").await.json();
    let urls = listed["urls"].as_array().expect("a list").iter();
    urls.map(|url| url.as_str().expect("a URL").to_owned()).collect()
}

/// Returns a worker as `/workers` shows it.
async fn worker(client: &mut Client, url: &str) -> Value {
    let listed = client.get("/workers").await.json();
    let mut workers = listed["workers"].as_array().expect("a list").iter();
    workers.find(|worker| worker["url"] == url).expect("it is registered").clone()
}

fn ask(max_tokens: usize) -> String {
    format!(r#"{{"prompt":"a","max_tokens":{max_tokens},"stream":true}}"#)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a kube-apiserver: make test-kubernetes"]
async fn workers_are_the_pods_and_only_ready_ones_get_requests() {
    let cluster = Cluster::start("pods").await;
    let first = pod("127.0.0.1", 0).await;
    let port = first.address().port();
    let second = pod("127.0.0.2", port).await;
    let url = |ip: &str| format!("http://{ip}:{port}");

    // One pod exists before the router, one comes later, one is never ready.
    cluster.run("first", "127.0.0.1").await;
    let started = Instant::now();
    let (mut router, mut client) = router(&cluster, port).await;
    until(&mut router, started, format!("worker {} is up", url("127.0.0.1"))).await;
    cluster.create("second").await.expect("new");
    cluster.create("third").await.expect("new");
    cluster.report("third", "127.0.0.3", false).await;
    let reported = Instant::now();
    cluster.report("second", "127.0.0.2", true).await;
    until(&mut router, reported, format!("worker {} is up", url("127.0.0.2"))).await;
    assert_eq!(urls(&mut client).await, [url("127.0.0.1"), url("127.0.0.2")]);

    // Not ready: it stays registered and gets no requests.
    let id = worker(&mut client, &url("127.0.0.1")).await["id"].clone();
    let reported = Instant::now();
    cluster.report("first", "127.0.0.1", false).await;
    until(&mut router, reported, format!("worker {} is not ready", url("127.0.0.1"))).await;
    let shown = worker(&mut client, &url("127.0.0.1")).await;
    assert_eq!(shown["healthy"], false);
    assert_eq!(shown["trouble"]["reason"], "its discovery source reports it as not ready");
    let mut stream = client.send(post("/v1/completions", ask(200))).await.expect("an answer");
    assert_eq!(stream.status(), StatusCode::OK);
    stream.frame().await.expect("a frame").expect("whole");
    assert_eq!(first.stats().totals.requests, 0);

    // Deleted during a stream: the worker is out at once, and the stream finishes.
    let retired = Instant::now();
    cluster.retire("second").await;
    until(&mut router, retired, format!("worker {} removed", url("127.0.0.2"))).await;
    let rest = soon(stream.collect()).await.expect("the stream goes on").to_bytes();
    assert!(rest.ends_with(b"data: [DONE]\n\n"), "{rest:?}");
    assert_eq!(urls(&mut client).await, [url("127.0.0.1")]);
    assert_eq!(client.get("/readiness").await.status, StatusCode::SERVICE_UNAVAILABLE);
    drop(second);

    // Ready again: the same worker, with its learned state.
    let reported = Instant::now();
    cluster.report("first", "127.0.0.1", true).await;
    until(&mut router, reported, format!("worker {} is ready again", url("127.0.0.1"))).await;
    let shown = worker(&mut client, &url("127.0.0.1")).await;
    assert_eq!(
        (&shown["id"], &shown["healthy"], &shown["trouble"]),
        (&id, &true.into(), &Value::Null)
    );
    let answer = client.post("/v1/completions", ask(3)).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(first.stats().totals.requests, 1);

    // Deleted while it is not ready. The address goes to another pod: another worker, with nothing of the last one's.
    cluster.report("first", "127.0.0.1", false).await;
    router.line_with(&format!("worker {} is not ready", url("127.0.0.1"))).await;
    cluster.delete("first").await;
    router.line_with(&format!("worker {} removed", url("127.0.0.1"))).await;
    assert_eq!(urls(&mut client).await, [] as [String; 0]);
    cluster.run("heir", "127.0.0.1").await;
    router.line_with(&format!("worker {} is up", url("127.0.0.1"))).await;
    assert!(worker(&mut client, &url("127.0.0.1")).await["id"].as_u64() > id.as_u64());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a kube-apiserver: make test-kubernetes"]
async fn serving_continues_without_the_api_server() {
    let mut cluster = Cluster::start("away").await;
    let first = pod("127.0.0.1", 0).await;
    let port = first.address().port();
    let second = pod("127.0.0.2", port).await;
    let (mut router, mut client) = router(&cluster, port).await;
    for (name, ip) in [("first", "127.0.0.1"), ("second", "127.0.0.2")] {
        cluster.run(name, ip).await;
        router.line_with(&format!("worker http://{ip}:{port} is up")).await;
    }
    cluster.kill_apiserver().await;
    router.line_with("the workers stay as they are").await;
    assert_eq!(urls(&mut client).await.len(), 2);
    let answer = client.post("/v1/completions", ask(3)).await;
    assert_eq!(answer.status, StatusCode::OK);

    // It comes back with a history that the router cannot follow, and a pod has gone meanwhile.
    cluster.delete_unseen("second").await;
    cluster.start_apiserver().await;
    let back = Instant::now();
    until(&mut router, back, format!("worker http://127.0.0.2:{port} removed")).await;
    assert_eq!(urls(&mut client).await, [first.url()]);
    let reported = Instant::now();
    cluster.run("third", "127.0.0.2").await;
    until(&mut router, reported, format!("worker {} is up", second.url())).await;
}
