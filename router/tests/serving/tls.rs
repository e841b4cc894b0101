//! HTTPS for clients, with certificates of the test.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use http::StatusCode;
use mla_router::{Config, RouterHandle, StartError, fleet::Phase};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::support::{
    Client, FakeWorker, Folder, Process, Raw, Reply, all_in, config, post, router,
};

/// A certificate authority, and a certificate of it for `localhost` in files.
pub(crate) struct Made {
    folder: Folder,
    ca: CertificateParams,
    ca_key: KeyPair,
    roots: RootCertStore,
}

impl Made {
    pub(crate) fn new() -> Self {
        let ca_key = KeyPair::generate().expect("random numbers");
        let mut ca = CertificateParams::default();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let mut roots = RootCertStore::empty();
        let certificate = ca.self_signed(&ca_key).expect("signed");
        roots.add(certificate.der().clone()).expect("a CA");
        let folder = Folder::new();
        std::fs::write(folder.path().join("ca.pem"), certificate.pem()).expect("writable");
        let made = Self { folder, ca, ca_key, roots };
        made.issue();
        made
    }

    /// Writes a new certificate over the last one.
    fn issue(&self) {
        let key = KeyPair::generate().expect("random numbers");
        let params = CertificateParams::new(["localhost".to_owned()]).expect("a name");
        let issuer = Issuer::from_params(&self.ca, &self.ca_key);
        let certificate = params.signed_by(&key, &issuer).expect("signed");
        std::fs::write(self.file("chain.pem"), certificate.pem()).expect("writable");
        std::fs::write(self.file("key.pem"), key.serialize_pem()).expect("writable");
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn config(&self) -> Config {
        Config {
            tls_cert_path: Some(self.file("chain.pem")),
            tls_key_path: Some(self.file("key.pem")),
            ..config()
        }
    }
}

async fn connect(
    address: SocketAddr,
    roots: RootCertStore,
) -> std::io::Result<TlsStream<TcpStream>> {
    shake_hands(TcpStream::connect(address).await.expect("the router listens"), roots).await
}

async fn shake_hands(
    stream: TcpStream,
    roots: RootCertStore,
) -> std::io::Result<TlsStream<TcpStream>> {
    let provider = Arc::new(ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let mut tls = builder.expect("ring").with_root_certificates(roots).with_no_client_auth();
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let name = ServerName::try_from("localhost").expect("a name");
    TlsConnector::from(Arc::new(tls)).connect(name, stream).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_serves_clients_that_trust_the_authority() {
    let made = Made::new();
    let mut worker = FakeWorker::plain().await;
    let router = router(made.config(), &[&worker]).await;
    let stream = connect(router.local_addr(), made.roots.clone()).await.expect("trusted");
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    let mut client = Client::over(stream).await;
    for body in ["small".into(), "x".repeat(1 << 20)] {
        let answer = client.call(post("/generate", body.clone())).await.expect("whole");
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(worker.request().await.body, body);
    }
    let stranger = connect(router.local_addr(), RootCertStore::empty()).await;
    assert!(stranger.expect_err("not trusted").to_string().contains("UnknownIssuer"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_http_on_the_tls_port_closes_the_connection() {
    let made = Made::new();
    let mut worker = FakeWorker::plain().await;
    let router = router(made.config(), &[&worker]).await;
    let message = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}";
    let answer = Raw::send(router.local_addr(), message).await.read_bytes_to_close().await;
    assert!(!answer.starts_with(b"HTTP"), "at most an alert of TLS: {answer:?}");
    assert_eq!(worker.requests_so_far(), 0);
    let stream = connect(router.local_addr(), made.roots.clone()).await.expect("still there");
    assert_eq!(Client::over(stream).await.get("/liveness").await.status, StatusCode::OK);
}

#[tokio::test]
async fn invalid_certificate_is_a_start_error() {
    let made = Made::new();
    let start = async |config: Config| match RouterHandle::start(Config { port: 0, ..config }).await
    {
        Err(error @ StartError::Tls(_)) => error.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("started"),
    };
    std::fs::write(made.file("empty.pem"), "").expect("writable");
    let missing = Config { tls_key_path: Some(made.file("nothing.pem")), ..made.config() };
    let error = start(missing).await;
    assert!(error.starts_with("--tls-key-path ") && error.contains("nothing.pem: "), "{error}");
    let empty = Config { tls_cert_path: Some(made.file("empty.pem")), ..made.config() };
    let error = start(empty).await;
    assert!(error.starts_with("--tls-cert-path ") && error.contains("empty.pem: "), "{error}");
    let zeros = Config { tls_cert_path: Some("/dev/zero".into()), ..made.config() };
    let error = start(zeros).await;
    assert_eq!(error, "--tls-cert-path /dev/zero: not a regular file");
    let zeros = Config { tls_key_path: Some("/dev/zero".into()), ..made.config() };
    let error = start(zeros).await;
    assert_eq!(error, "--tls-key-path /dev/zero: not a regular file");
    let other = Made::new();
    let mixed = Config { tls_key_path: Some(other.file("key.pem")), ..made.config() };
    let error = start(mixed).await;
    assert!(error.starts_with("--tls-cert-path "), "{error}");
}

/// The certificate that the router shows to a new client.
async fn shown(address: SocketAddr, made: &Made) -> CertificateDer<'static> {
    let stream = connect(address, made.roots.clone()).await.expect("trusted");
    let shown = stream.get_ref().1.peer_certificates().expect("a certificate");
    shown[0].clone().into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewed_certificate_is_loaded_and_a_broken_one_ignored() {
    let made = Made::new();
    let (chain, key) = (made.file("chain.pem"), made.file("key.pem"));
    let on_disk = || CertificateDer::from_pem_file(&chain).expect("a certificate");
    let [chain_path, key_path] = [&chain, &key].map(|path| path.to_str().expect("UTF-8"));
    let flags = ["--port", "0", "--tls-cert-path", chain_path, "--tls-key-path", key_path];
    let mut router = Process::start(&flags);
    let address = router.address().await;
    let stream = connect(address, made.roots.clone()).await.expect("trusted");
    let mut early = Client::over(stream).await;
    let first = on_disk();
    assert_eq!(shown(address, &made).await, first);

    made.issue();
    let second = on_disk();
    assert_ne!(second, first);
    let line = router.line_with("a new certificate is in use").await;
    assert!(line.contains(chain_path), "{line}");
    assert_eq!(shown(address, &made).await, second);
    assert_eq!(early.get("/liveness").await.status, StatusCode::OK, "it keeps what it has");

    // The key of another certificate, and then none.
    std::fs::rename(Made::new().file("key.pem"), &key).expect("writable");
    let line = router.line_with("the certificate in use stays").await;
    assert!(line.contains("--tls-cert-path ") && line.contains(chain_path), "{line}");
    std::fs::remove_file(&key).expect("there");
    let line = router.line_with("the certificate in use stays").await;
    assert!(line.contains("--tls-key-path ") && line.contains(key_path), "{line}");
    assert_eq!(shown(address, &made).await, second);

    made.issue();
    router.line_with("a new certificate is in use").await;
    assert_eq!(shown(address, &made).await, on_disk());
}

/// rustls accepts the last bytes of a response while earlier ones wait for the client. The client must get them
/// after any pause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_reader_gets_its_complete_answer() {
    const LENGTH: usize = 1 << 20;
    /// Less than the kernel and rustls hold, more than the kernel does.
    const TAIL: usize = 56 << 10;
    /// Longer than the idle time after which the router takes a connection from hyper.
    const PAUSE: Duration = Duration::from_secs(2);
    let made = Made::new();
    let worker = FakeWorker::start(|_| Reply::ok("x".repeat(LENGTH))).await;
    // Connections that are accepted here have a small buffer for sending, too.
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_send_buffer_size(8 << 10).expect("a size");
    socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
    let url = worker.url().parse().expect("a URL");
    let config = Config { worker_urls: vec![url], ..made.config() };
    let listener = socket.listen(1).expect("bound");
    let router = RouterHandle::serve(listener, config).await.expect("a config to start with");
    all_in(Phase::Healthy, &router).await;
    let stream = TcpSocket::new_v4().expect("a socket");
    stream.set_recv_buffer_size(8 << 10).expect("a size");
    let stream = stream.connect(router.local_addr()).await.expect("the router listens");
    let mut stream = shake_hands(stream, made.roots.clone()).await.expect("trusted");
    let request = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}";
    stream.write_all(request).await.expect("the router reads");
    let mut taken = 0;
    let mut bytes = vec![0; 4 << 10];
    while taken < LENGTH - TAIL {
        taken += stream.read(&mut bytes).await.expect("open");
    }
    tokio::time::sleep(PAUSE).await;
    let rest = async {
        while taken < LENGTH {
            taken += stream.read(&mut bytes).await.expect("open");
        }
    };
    // Far less than idle connections have, far more than it takes.
    let all = tokio::time::timeout(Duration::from_secs(30), rest).await;
    assert!(all.is_ok(), "{taken} of {LENGTH} bytes have come");
}
