//! Workers with HTTPS, with certificates of the test.

use std::sync::Arc;

use http::StatusCode;
use mla_router::{Config, RouterHandle, StartError, fleet::Phase};
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::{
    support::{Client, FakeWorker, Reply, Speaks, config, router, router_without_waiting, secs},
    tls::Made,
};

/// A worker with a certificate for `localhost`, and its address under that name.
async fn worker(made: &Made) -> (FakeWorker, String) {
    let chain = CertificateDer::from_pem_file(made.file("chain.pem")).expect("a certificate");
    let key = PrivateKeyDer::from_pem_file(made.file("key.pem")).expect("a key");
    let mut tls = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring")
        .with_no_client_auth()
        .with_single_cert(vec![chain], key)
        .expect("a pair");
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let speaks = Speaks::Tls(TlsAcceptor::from(Arc::new(tls)));
    let worker = FakeWorker::speaking(speaks, |seen| Reply::ok(seen.body.clone())).await;
    let url = format!("https://localhost:{}", worker.address().port());
    (worker, url)
}

fn trusting(made: &Made, url: &str) -> Config {
    Config {
        worker_ca_cert_path: Some(made.file("ca.pem")),
        worker_urls: vec![url.parse().expect("a URL")],
        ..config()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trusted_worker_certificate_is_accepted_over_h1_and_h2() {
    let made = Made::new();
    for upstream_http2 in [false, true] {
        let (mut worker, url) = worker(&made).await;
        let router = router(Config { upstream_http2, ..trusting(&made, &url) }, &[]).await;
        let mut client = Client::connect(router.local_addr()).await;
        for body in ["{\"small\":1}".into(), "x".repeat(3 << 20)] {
            let answer = client.post("/v1/embeddings", body.clone()).await;
            assert_eq!(answer.status, StatusCode::OK);
            assert!(answer.body == body);
            let seen = worker.request().await;
            let version =
                if upstream_http2 { http::Version::HTTP_2 } else { http::Version::HTTP_11 };
            assert_eq!(seen.head.version, version);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn untrusted_worker_certificate_gets_no_request() {
    let (made, other) = (Made::new(), Made::new());
    let (mut worker, url) = worker(&other).await;
    let config = Config { queue_timeout_secs: secs(0.1), ..trusting(&made, &url) };
    let router = router_without_waiting(config, &[]).await;
    let answer = Client::connect(router.local_addr()).await.post("/generate", "{}").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(router.workers()[0].phase, Phase::Starting);
    assert_eq!(worker.requests_so_far(), 0);
}

#[tokio::test]
async fn certificate_file_without_certificates_is_a_start_error() {
    let made = Made::new();
    for name in ["key.pem", "missing.pem"] {
        let config = Config { worker_ca_cert_path: Some(made.file(name)), ..config() };
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        match RouterHandle::serve(listener, config).await.map(drop) {
            Err(StartError::Tls(why)) => {
                assert!(why.contains("--worker-ca-cert-path") && why.contains(name), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
}
