//! The address of a worker. A worker that was added over HTTP must lie in an allowed network.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{
    net::{TcpStream, lookup_host},
    time::timeout,
};

use crate::{config::Network, error::Error, names::WorkerUrl};

/// The URL of a worker, with the networks in which its addresses must lie if its source is not trusted. A client
/// must not make the router call the metadata service of a cloud, or a host behind a firewall.
#[derive(Clone, Debug)]
pub struct WorkerAddress {
    url: WorkerUrl,
    within: Option<Arc<Networks>>,
}

impl WorkerAddress {
    /// An address from the command line, a file or a cluster: not restricted.
    pub fn trusted(url: WorkerUrl) -> Self {
        Self { url, within: None }
    }

    /// An address from a client. Fails unless all addresses of its host lie within `networks`.
    pub async fn checked(
        url: WorkerUrl,
        networks: Networks,
        limit: Duration,
    ) -> Result<Self, Error> {
        let refuse = |why: String| Error::BadRequest {
            param: "url",
            message: format!("worker URL {url:?}: {why}"),
        };
        match timeout(limit, networks.resolve(&url)).await {
            Ok(Ok(_)) => Ok(Self { url, within: Some(Arc::new(networks)) }),
            Ok(Err(error)) => Err(refuse(error.to_string())),
            Err(_) => Err(refuse(format!("its host has no address within {limit:?}"))),
        }
    }

    pub fn url(&self) -> &WorkerUrl {
        &self.url
    }

    /// Opens a connection. The addresses of a name may change, so each connection is checked, and goes to a checked
    /// address.
    pub async fn connect(&self) -> io::Result<TcpStream> {
        match &self.within {
            None => TcpStream::connect((self.url.host(), self.url.port())).await,
            Some(networks) => TcpStream::connect(&*networks.resolve(&self.url).await?).await,
        }
    }
}

/// The networks in which workers may lie; loopback and private networks if empty.
#[derive(Clone, Debug)]
pub struct Networks(Vec<Network>);

impl Networks {
    pub fn new(networks: &[Network]) -> Self {
        Self(networks.to_vec())
    }

    /// Resolves a URL. Fails if one of its addresses is not allowed.
    async fn resolve(&self, url: &WorkerUrl) -> io::Result<Vec<SocketAddr>> {
        let addresses: Vec<_> = lookup_host((url.host(), url.port())).await?.collect();
        match addresses.iter().find(|address| !self.allow(address.ip())) {
            None => Ok(addresses),
            Some(address) => Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("{} is outside --worker-networks", address.ip()),
            )),
        }
    }

    fn allow(&self, address: IpAddr) -> bool {
        // An IPv4-mapped address is the same host: ::ffff:169.254.169.254.
        let address = address.to_canonical();
        if self.0.is_empty() {
            is_private(address)
        } else {
            self.0.iter().any(|network| network.contains(&address))
        }
    }
}

fn is_private(address: IpAddr) -> bool {
    /// The metadata service of AWS, within a private range.
    const METADATA: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_private(),
        IpAddr::V6(address) => {
            address.is_loopback() || address.is_unique_local() && address != METADATA
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(networks: &[&str], address: &str) -> bool {
        let networks: Vec<Network> =
            networks.iter().map(|network| network.parse().expect("a network")).collect();
        Networks::new(&networks).allow(address.parse().expect("an address"))
    }

    #[test]
    fn by_default_workers_lie_in_private_networks() {
        for address in ["127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.0.9", "::1", "fd12::1"] {
            assert!(allowed(&[], address), "{address}");
        }
        for address in [
            "0.0.0.0",
            "::",
            "8.8.8.8",
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "::ffff:8.8.8.8",
            "100.100.100.200",
            "172.32.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "fe80::1",
            "ff02::1",
            "fd00:ec2::254",
            "64:ff9b::7f00:1",
            "2001:db8::1",
        ] {
            assert!(!allowed(&[], address), "{address}");
        }
    }

    #[test]
    fn named_networks_replace_the_default() {
        let networks = ["203.0.113.0/24", "fe80::/10"];
        for address in ["203.0.113.7", "::ffff:203.0.113.7", "fe80::1"] {
            assert!(allowed(&networks, address), "{address}");
        }
        for address in ["127.0.0.1", "10.0.0.1", "203.0.114.1", "::1"] {
            assert!(!allowed(&networks, address), "{address}");
        }
    }

    #[tokio::test]
    async fn every_notation_of_an_address_is_checked() {
        let check = async |url: &str| {
            let url = url.parse().expect("a URL");
            WorkerAddress::checked(url, Networks::new(&[]), Duration::from_secs(5)).await
        };
        for url in ["http://127.0.0.1:1", "http://[::1]:1", "http://2130706433:1"] {
            check(url).await.expect(url);
        }
        for url in [
            "http://169.254.169.254",
            "http://2852039166",
            "http://0xa9.0xfe.0xa9.0xfe",
            "http://0",
        ] {
            let error = check(url).await.expect_err(url);
            assert!(matches!(&error, Error::BadRequest { param: "url", .. }), "{error:?}");
            assert!(error.to_string().contains(url), "{error}");
        }
    }

    #[tokio::test]
    async fn a_name_that_moves_outside_is_refused() {
        let url: WorkerUrl = "http://127.0.0.1:1".parse().expect("a URL");
        let elsewhere = Networks::new(&["10.0.0.0/8".parse().expect("a network")]);
        let address = WorkerAddress { url, within: Some(Arc::new(elsewhere)) };
        let error = address.connect().await.expect_err("outside");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }
}
