//! Names of workers and models.

use std::{fmt, str::FromStr};

use http::{HeaderValue, Uri, uri::Authority};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::Error;

/// The number of a worker in this router. The registry never assigns a number twice, so state that was recorded for a
/// removed worker never belongs to a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u32);

/// The hash of a model name. Hashes are compared; the names themselves are kept only where they are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelName(u64);

impl ModelName {
    pub fn new(name: &str) -> Self {
        Self(xxh3_64(name.as_bytes()))
    }
}

/// The URL of a worker: `http(s)://HOST[:PORT]`. A path, a query or credentials are refused: the router adds the path
/// of the client, so they would be lost. Two spellings of one address are equal.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WorkerUrl {
    text: String,
    tls: bool,
    host: String,
    port: u16,
}

impl WorkerUrl {
    /// Parses a URL sent by a client. Fails with `BadRequest` for the field `url`.
    pub fn from_client(text: &str) -> Result<Self, Error> {
        text.parse().map_err(|message| Error::BadRequest { param: "url", message })
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The host for a resolver: an IPv6 address has no brackets.
    pub fn host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    /// Whether the scheme is `https`.
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The value of the `Host` header.
    pub fn authority(&self) -> HeaderValue {
        let (_, authority) = self.text.split_once("://").expect("contract: a URL has a scheme");
        HeaderValue::from_str(authority).expect("contract: a parsed authority is a header value")
    }
}

impl FromStr for WorkerUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = |why: &str| Err(format!("worker URL {text:?}: {why}"));
        if text.contains(',') {
            return refuse("several URLs are separated by spaces");
        }
        let Ok(uri) = text.trim().parse::<Uri>() else {
            return refuse("not a URL; expected http://HOST:PORT or https://HOST:PORT");
        };
        let (tls, default_port) = match uri.scheme_str() {
            Some("http") => (false, 80),
            Some("https") => (true, 443),
            _ => return refuse("must start with http:// or https://"),
        };
        if text.contains('#') || uri.query().is_some() || !matches!(uri.path(), "" | "/") {
            return refuse("must end after the port: no path, query or fragment");
        }
        let Some(authority) = uri.authority() else {
            return refuse("has no host");
        };
        if authority.as_str().contains('@') {
            return refuse("must not carry a user name or password");
        }
        let host = authority.host().to_ascii_lowercase();
        let Some(port) = port_of(authority, default_port) else {
            return refuse("has a port that is not between 1 and 65535");
        };
        if host.is_empty() {
            return refuse("has no host");
        }
        let scheme = if tls { "https" } else { "http" };
        let text = if port == default_port {
            format!("{scheme}://{host}")
        } else {
            format!("{scheme}://{host}:{port}")
        };
        Ok(Self { text, tls, host, port })
    }
}

fn port_of(authority: &Authority, default: u16) -> Option<u16> {
    match authority.as_str().strip_prefix(authority.host())? {
        "" => Some(default),
        rest => rest.strip_prefix(':')?.parse().ok().filter(|port| *port != 0),
    }
}

impl TryFrom<String> for WorkerUrl {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<WorkerUrl> for String {
    fn from(url: WorkerUrl) -> Self {
        url.text
    }
}

impl fmt::Display for WorkerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for WorkerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_address_are_one_worker() {
        for (text, normal) in [
            ("http://w1:8000", "http://w1:8000"),
            ("http://W1:8000/", "http://w1:8000"),
            (" http://w1:80 ", "http://w1"),
            ("http://[::1]:31000", "http://[::1]:31000"),
            ("HTTPS://W1:443", "https://w1"),
            ("https://w1:80", "https://w1:80"),
            ("http://w1:443", "http://w1:443"),
        ] {
            assert_eq!(text.parse::<WorkerUrl>().expect(text).as_str(), normal);
        }
        let tls: WorkerUrl = "https://w1".parse().expect("valid");
        assert_eq!(
            (tls.is_tls(), tls.port(), tls.authority()),
            (true, 443, "w1".parse().expect(""))
        );
        let v6: WorkerUrl = "http://[::1]:31000".parse().expect("valid");
        assert_eq!((v6.host(), v6.port()), ("::1", 31000));
    }

    #[test]
    fn anything_but_a_plain_address_is_refused() {
        for text in [
            "",
            "w1:8000",
            "https:w1",
            "ftp://w1",
            "http://",
            "http:///x",
            "http://w1/v1",
            "http://w1?x=1",
            "http://w1/#x",
            "http://user@w1",
            "http://u:p@w1:80",
            "http://w1:0",
            "http://w1:99999",
            "http://w1:",
            "http://w 1",
            "http://w1\r\nx: y",
            "http://w1,http://w2",
        ] {
            assert!(text.parse::<WorkerUrl>().is_err(), "{text:?} was accepted");
        }
    }
}
