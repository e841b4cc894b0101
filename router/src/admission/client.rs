//! The clients between which `--queue-policy fair` divides the queue.

use std::{
    hash::{BuildHasher, RandomState},
    net::IpAddr,
};

use http::{HeaderMap, header};

use crate::config::{Config, QueuePolicy};

/// A hash of an API key, or of an address where the router requires no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Client(u64);

#[cfg(test)]
impl From<u64> for Client {
    fn from(hash: u64) -> Self {
        Self(hash)
    }
}

/// Distinguishes clients. The hash is keyed, so that a client cannot choose the hash of another one.
#[derive(Debug)]
pub(super) struct Clients {
    has_keys: bool,
    hasher: RandomState,
}

impl Clients {
    /// `None` under `fcfs`, which treats all requests as requests of one client.
    pub(super) fn new(config: &Config) -> Option<Self> {
        let fair = config.queue_policy == QueuePolicy::Fair;
        fair.then(|| Self { has_keys: !config.api_key.is_empty(), hasher: RandomState::new() })
    }

    /// The client of a request that has passed the check of its key. Without keys, an Authorization header proves
    /// nothing, so the address counts.
    pub(super) fn of(&self, headers: &HeaderMap, address: IpAddr) -> Client {
        let key = headers.get(header::AUTHORIZATION).filter(|_| self.has_keys);
        Client(match key {
            Some(key) => self.hasher.hash_one(key.as_bytes()),
            None => self.hasher.hash_one(network(address)),
        })
    }
}

/// The address; of IPv6, the /64 network, because one host has all addresses of it.
fn network(address: IpAddr) -> u128 {
    match address.to_canonical() {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits() & !u128::from(u64::MAX),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn headers(key: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(key))])
    }

    fn clients(keys: &[&str]) -> Clients {
        let api_key = keys.iter().map(|key| key.parse().expect("a key")).collect();
        let config = Config { queue_policy: QueuePolicy::Fair, api_key, ..Config::default() };
        Clients::new(&config).expect("fair")
    }

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn keys_tell_clients_apart_wherever_they_come_from() {
        let clients = clients(&["a", "b"]);
        let (here, there) = (address("10.0.0.1"), address("10.0.0.2"));
        let [a, b] = ["Bearer a", "Bearer b"].map(headers);
        assert_eq!(clients.of(&a, here), clients.of(&a, there));
        assert_ne!(clients.of(&a, here), clients.of(&b, here));
    }

    #[test]
    fn without_keys_the_network_counts_and_no_header() {
        let clients = clients(&[]);
        let of = |key, text| clients.of(&headers(key), address(text));
        assert_eq!(of("Bearer a", "10.0.0.1"), of("Bearer b", "::ffff:10.0.0.1"));
        assert_ne!(of("Bearer a", "10.0.0.1"), of("Bearer a", "10.0.0.2"));
        assert_eq!(of("Bearer a", "2001:db8::1"), of("Bearer a", "2001:db8::ffff:2"));
        assert_ne!(of("Bearer a", "2001:db8::1"), of("Bearer a", "2001:db8:0:1::1"));
    }

    #[test]
    fn first_come_first_served_knows_no_clients() {
        assert!(Clients::new(&Config::default()).is_none());
    }
}
