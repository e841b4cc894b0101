//! HTTPS for clients: `--tls-cert-path` and `--tls-key-path`. Both files may be renewed while the router runs.

use std::{
    fmt::Display,
    path::{Path, PathBuf},
    sync::Arc,
};

use arc_swap::ArcSwap;
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio_rustls::TlsAcceptor;

use crate::{config::Config, error::StartError, file, file_watch::DebouncedFileWatch};

/// The paths of certificate and key.
#[derive(Clone)]
struct Files {
    chain: PathBuf,
    key: PathBuf,
}

/// The contents of the files.
#[derive(PartialEq)]
struct Pem {
    chain: Vec<u8>,
    key: Vec<u8>,
}

/// The certificate for new connections. Open connections keep theirs.
pub(crate) struct Tls(ArcSwap<ServerConfig>);

impl Tls {
    /// Reads the files. Returns the certificate and a future that follows their changes; `None` for plain HTTP.
    /// Fails if a file cannot be used.
    pub(crate) fn start(
        config: &Config,
    ) -> Result<Option<(Arc<Self>, impl Future<Output = ()> + use<>)>, StartError> {
        let (Some(chain), Some(key)) = (&config.tls_cert_path, &config.tls_key_path) else {
            return Ok(None);
        };
        let files = Files { chain: chain.clone(), key: key.clone() };
        let pem = files.read().map_err(StartError::Tls)?;
        let current = files.server_config(&pem).map_err(StartError::Tls)?;
        let tls = Arc::new(Self(ArcSwap::from_pointee(current)));
        let following = Arc::clone(&tls).follow(files, pem);
        Ok(Some((tls, following)))
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.0.load_full())
    }

    async fn follow(self: Arc<Self>, files: Files, current: Pem) {
        let reading = files.clone();
        let changed = |read: &Result<Pem, String>| match read
            .as_ref()
            .map_err(String::clone)
            .and_then(|pem| files.server_config(pem))
        {
            Ok(config) => {
                self.0.store(Arc::new(config));
                tracing::info!("{}: a new certificate is in use", files.chain.display());
            }
            Err(why) => tracing::warn!("{why}; the certificate in use stays"),
        };
        DebouncedFileWatch::on(Ok(current)).follow(move || reading.read(), changed).await;
    }
}

impl Files {
    fn read(&self) -> Result<Pem, String> {
        let chain = file::read(&self.chain).map_err(|error| of_chain(&self.chain, error))?;
        let key = file::read(&self.key).map_err(|error| of_key(&self.key, error))?;
        Ok(Pem { chain, key })
    }

    fn server_config(&self, pem: &Pem) -> Result<ServerConfig, String> {
        let certificates = CertificateDer::pem_slice_iter(&pem.chain)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| of_chain(&self.chain, error))?;
        let private =
            PrivateKeyDer::from_pem_slice(&pem.key).map_err(|error| of_key(&self.key, error))?;
        // Set explicitly, because a program that embeds the router may have another default.
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let mut tls = builder
            .with_no_client_auth()
            .with_single_cert(certificates, private)
            .map_err(|error| of_chain(&self.chain, error))?;
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(tls)
    }
}

fn of_chain(path: &Path, error: impl Display) -> String {
    format!("--tls-cert-path {}: {error}", path.display())
}

fn of_key(path: &Path, error: impl Display) -> String {
    format!("--tls-key-path {}: {error}", path.display())
}
