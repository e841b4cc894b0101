//! Opens connections to workers: TCP, TLS for https URLs, then the HTTP handshake.

use std::{
    io,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::{
    ClientConfig, InvalidMessage, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::{Connection, UpstreamError, http1::Http1, http2::Http2};
use crate::{
    config::Config,
    error::StartError,
    file,
    names::WorkerUrl,
    upstream::address::WorkerAddress,
    wire::transport::{self, Transport},
};

/// HTTP/2 window of one response: bytes that may wait for a slow client.
const STREAM_WINDOW: u32 = 256 << 10;
/// HTTP/2 window of a connection: the largest one, so that slow clients do not block the others on the connection.
const CONNECTION_WINDOW: u32 = i32::MAX as u32;

/// The settings of all connections to workers.
#[derive(Debug)]
pub struct Dialer {
    timeout: Duration,
    http2: bool,
    /// Created for the first https worker, or at the start if --worker-ca-cert-path is set.
    tls: OnceLock<Arc<ClientConfig>>,
}

impl Dialer {
    pub fn new(config: &Config) -> Result<Self, StartError> {
        let dialer = Self {
            timeout: config.connect_timeout_secs.get(),
            http2: config.upstream_http2,
            tls: OnceLock::new(),
        };
        if let Some(path) = &config.worker_ca_cert_path {
            let roots = read_roots(path).map_err(|error| {
                StartError::Tls(format!("--worker-ca-cert-path {}: {error}", path.display()))
            })?;
            dialer.tls.get_or_init(|| dialer.client_config(roots));
        }
        Ok(dialer)
    }

    /// Time limit for opening a connection.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether the requests to a worker share connections (HTTP/2).
    pub(super) fn shares(&self) -> bool {
        self.http2
    }

    pub(super) async fn connect(
        &self,
        address: &WorkerAddress,
    ) -> Result<Connection, UpstreamError> {
        let opening = timeout(self.timeout, self.open(address));
        opening.await.unwrap_or(Err(UpstreamError::ConnectTimeout(self.timeout)))
    }

    async fn open(&self, address: &WorkerAddress) -> Result<Connection, UpstreamError> {
        let stream = address.connect().await?;
        transport::prepare(&stream);
        let transport = if address.url().is_tls() {
            let tls = self.tls.get_or_init(|| self.client_config(system_roots()));
            let name = ServerName::try_from(address.url().host().to_owned());
            let name = name.map_err(io::Error::other)?;
            let stream = TlsConnector::from(Arc::clone(tls))
                .connect(name, stream)
                .await
                .map_err(explained)?;
            if self.http2 && stream.get_ref().1.alpn_protocol() != Some(b"h2") {
                return Err(io::Error::other("the worker does not speak HTTP/2").into());
            }
            Transport::Tls(Box::new(stream.into()))
        } else {
            Transport::Tcp(stream)
        };
        if self.http2 {
            let shared = shake_hands(transport, address.url()).await;
            return shared.map_err(|error| UpstreamError::Reset(io::Error::other(error)));
        }
        Ok(Connection::http1(Http1::new(transport)))
    }

    fn client_config(&self, roots: RootCertStore) -> Arc<ClientConfig> {
        // Set explicitly, because a program that embeds the router may have another default.
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("contract: ring knows the default versions");
        let mut tls = builder.with_root_certificates(roots).with_no_client_auth();
        tls.alpn_protocols = vec![if self.http2 { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
        Arc::new(tls)
    }
}

/// Says what the worker did, if it answered the handshake with plain HTTP.
fn explained(error: io::Error) -> io::Error {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
    match cause {
        Some(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType)) => {
            io::Error::new(error.kind(), "the worker does not speak TLS; is its URL http://?")
        }
        _ => error,
    }
}

async fn shake_hands(transport: Transport, url: &WorkerUrl) -> Result<Connection, hyper::Error> {
    let (sender, driver) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .handshake(TokioIo::new(transport))
        .await?;
    Ok(Connection::http2(Http2::run(sender, driver, url)))
}

fn read_roots(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    let pem = file::read(path).map_err(|error| error.to_string())?;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|error| error.to_string())?;
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    if roots.is_empty() { Err("it has no certificate".to_owned()) } else { Ok(roots) }
}

fn system_roots() -> RootCertStore {
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        tracing::warn!("the system's certificates: {error}");
    }
    let mut roots = RootCertStore::empty();
    let (added, _ignored) = roots.add_parsable_certificates(found.certs);
    tracing::debug!("{added} certificates of the system's");
    roots
}
