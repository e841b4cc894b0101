//! Where a worker's connections go, and where those of a worker that a client has named may not go.

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

/// A worker's URL, with the networks in which it must lie if whoever named it is not trusted: the
/// router must not be made to call a cloud's metadata service, or some host beyond the firewall.
#[derive(Clone, Debug)]
pub struct WorkerAddress {
    url: WorkerUrl,
    within: Option<Arc<Networks>>,
}

impl WorkerAddress {
    /// From the command line, a file or a cluster: wherever it leads.
    pub fn trusted(url: WorkerUrl) -> Self {
        Self { url, within: None }
    }

    /// From a client. Refused unless all that its name stands for lies within `networks`.
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

    /// Opens a connection. A name may stand for another address at any time, so that each connection
    /// is checked: it goes to an address that was found good, and not to what the name means next.
    pub async fn connect(&self) -> io::Result<TcpStream> {
        match &self.within {
            None => TcpStream::connect((self.url.host(), self.url.port())).await,
            Some(networks) => TcpStream::connect(&*networks.resolve(&self.url).await?).await,
        }
    }
}

/// The networks in which workers may lie; loopback and private ones if none is named.
#[derive(Clone, Debug)]
pub struct Networks(Vec<Network>);

impl Networks {
    pub fn new(networks: &[Network]) -> Self {
        Self(networks.to_vec())
    }

    /// The addresses of a URL, if all of them are allowed.
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
        // The same host in another notation: ::ffff:169.254.169.254.
        let address = address.to_canonical();
        if self.0.is_empty() {
            is_private(address)
        } else {
            self.0.iter().any(|network| network.contains(&address))
        }
    }
}

fn is_private(address: IpAddr) -> bool {
    /// AWS's metadata service, within what is otherwise a private range.
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
    fn who_names_networks_means_these_and_no_others() {
        let networks = ["203.0.113.0/24", "fe80::/10"];
        for address in ["203.0.113.7", "::ffff:203.0.113.7", "fe80::1"] {
            assert!(allowed(&networks, address), "{address}");
        }
        for address in ["127.0.0.1", "10.0.0.1", "203.0.114.1", "::1"] {
            assert!(!allowed(&networks, address), "{address}");
        }
    }

    #[tokio::test]
    async fn every_address_is_checked_however_it_is_written() {
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
    async fn a_name_that_moves_is_not_followed_out() {
        let url: WorkerUrl = "http://127.0.0.1:1".parse().expect("a URL");
        let elsewhere = Networks::new(&["10.0.0.0/8".parse().expect("a network")]);
        let address = WorkerAddress { url, within: Some(Arc::new(elsewhere)) };
        let error = address.connect().await.expect_err("outside");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }
}
