//! Workers that come and go by a file.

use std::{fs, path::PathBuf};

use http::StatusCode;
use mla_router::{Config, RouterHandle, fleet::Phase};

use crate::support::{Client, FakeWorker, Reply, config, router_without_waiting, soon};

/// A file of one test's own.
struct UrlsFile(PathBuf);

impl UrlsFile {
    fn with(name: &str, text: &str) -> Self {
        let name = format!("mla-router-{}-{name}", std::process::id());
        let file = Self(std::env::temp_dir().join(name));
        file.write(text);
        file
    }

    fn write(&self, text: &str) {
        fs::write(&self.0, text).expect("a place for temporary files");
    }

    fn config(&self) -> Config {
        Config { worker_urls_file: Some(self.0.clone()), ..config() }
    }
}

impl Drop for UrlsFile {
    fn drop(&mut self) {
        let _gone = fs::remove_file(&self.0);
    }
}

/// Waits until these are the workers, all of them in rotation.
async fn until_serving(router: &RouterHandle, workers: &[&FakeWorker]) {
    let mut urls: Vec<String> = workers.iter().map(|worker| worker.url()).collect();
    urls.sort();
    let is_so = |workers: &[std::sync::Arc<mla_router::fleet::Replica>]| {
        let mut there: Vec<String> =
            workers.iter().map(|worker| worker.backend.url.as_str().to_owned()).collect();
        there.sort();
        there == urls && workers.iter().all(|worker| worker.backend.phase() == Phase::Healthy)
    };
    soon(router.router().registry.wait_until(is_so)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_follow_the_file() {
    let (first, second) = (FakeWorker::plain().await, FakeWorker::plain().await);
    let file = UrlsFile::with("follow", &format!("# one\n{}\n", first.url()));
    let router = router_without_waiting(file.config(), &[]).await;
    until_serving(&router, &[&first]).await;
    file.write(&format!("{}\n{} # new\n", first.url(), second.url()));
    until_serving(&router, &[&first, &second]).await;
    assert_eq!(router.workers()[0].id, 0, "the first has stayed the same worker");
    file.write(&format!("{}\n", second.url()));
    until_serving(&router, &[&second]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_file_removes_no_worker() {
    let (first, second) = (FakeWorker::plain().await, FakeWorker::plain().await);
    let file = UrlsFile::with("bad", &first.url());
    let router = router_without_waiting(file.config(), &[]).await;
    until_serving(&router, &[&first]).await;
    file.write("http://half-a-li ne");
    fs::remove_file(&file.0).expect("there");
    // The next good state is reached, and the first worker has been there all the time.
    file.write(&format!("{}\n{}\n", first.url(), second.url()));
    until_serving(&router, &[&first, &second]).await;
    assert_eq!(router.workers()[0].id, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_removed_from_the_file_finishes_its_requests() {
    let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let scripted = std::sync::Arc::clone(&gate);
    let mut leaving = FakeWorker::start(move |_| Reply::When(scripted.clone())).await;
    let staying = FakeWorker::plain().await;
    let file = UrlsFile::with("leave", &leaving.url());
    let router = router_without_waiting(file.config(), &[]).await;
    until_serving(&router, &[&leaving]).await;
    let address = router.local_addr();
    let asked = tokio::spawn(async move {
        Client::connect(address).await.post("/generate", r#"{"text":"x"}"#).await.status
    });
    leaving.request().await;
    file.write(&staying.url());
    until_serving(&router, &[&staying]).await;
    gate.add_permits(1);
    assert_eq!(asked.await.expect("no panic"), StatusCode::OK);
}

#[cfg(not(feature = "kubernetes"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubernetes_flag_is_an_error_without_the_feature() {
    let config = Config { service_discovery: true, port: 0, ..Config::default() };
    let error = RouterHandle::start(config).await.err().expect("refused");
    assert!(error.to_string().contains("--service-discovery"), "{error}");
    assert!(error.to_string().contains("feature `kubernetes`"), "{error}");
}

#[cfg(feature = "kubernetes")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_pod_selector_is_refused() {
    let config = Config { service_discovery: true, port: 0, ..Config::default() };
    let error = RouterHandle::start(config).await.err().expect("refused");
    assert!(error.to_string().contains("--selector"), "{error}");
}
