//! HTTPS towards clients: `--tls-cert-path` and `--tls-key-path`.

use std::{path::Path, sync::Arc};

use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio_rustls::TlsAcceptor;

use crate::{config::Config, handle::StartError};

/// `None` if the config asks for plain HTTP.
pub(crate) fn acceptor(config: &Config) -> Result<Option<TlsAcceptor>, StartError> {
    let (Some(chain), Some(key)) = (&config.tls_cert_path, &config.tls_key_path) else {
        return Ok(None);
    };
    let certificates = CertificateDer::pem_file_iter(chain)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| of_file("--tls-cert-path", chain, error))?;
    let private =
        PrivateKeyDer::from_pem_file(key).map_err(|error| of_file("--tls-key-path", key, error))?;
    // Named here, because a program that embeds the router may have chosen another one for itself.
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| StartError::Tls(error.to_string()))?;
    let mut tls = builder
        .with_no_client_auth()
        .with_single_cert(certificates, private)
        .map_err(|error| of_file("--tls-cert-path", chain, error))?;
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(TlsAcceptor::from(Arc::new(tls))))
}

fn of_file(flag: &str, path: &Path, error: impl std::fmt::Display) -> StartError {
    StartError::Tls(format!("{flag} {}: {error}", path.display()))
}
