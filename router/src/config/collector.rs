//! The address of the trace collector.

use std::str::FromStr;

use http::{Uri, uri::Authority};
use serde::{Deserialize, Serialize};

/// The default path of OTLP over HTTP.
const DEFAULT_PATH: &str = "/v1/traces";

/// The URL of an OpenTelemetry collector: `http://HOST:PORT`, with an optional path. TLS is not supported: the
/// collector, or its agent, runs on the machine of the router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CollectorUrl {
    authority: Authority,
    path: String,
}

impl CollectorUrl {
    pub(crate) fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Host and port for a connection.
    pub(crate) fn address(&self) -> (&str, u16) {
        let host = self.authority.host().trim_matches(['[', ']']);
        (host, self.authority.port_u16().unwrap_or(80))
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }
}

impl FromStr for CollectorUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.parse::<Uri>().map(Uri::into_parts);
        let parts = parts.map_err(|error| format!("{text:?} is not a URL: {error}"))?;
        let Some(authority) = parts
            .authority
            .filter(|_| parts.scheme == Some("http".parse().expect("contract: a scheme")))
        else {
            return Err(format!("{text:?} is not of the form http://HOST:PORT"));
        };
        let path = parts.path_and_query.map_or(String::new(), |path| path.to_string());
        let path = if path.is_empty() || path == "/" { DEFAULT_PATH.to_owned() } else { path };
        Ok(Self { authority, path })
    }
}

impl TryFrom<String> for CollectorUrl {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<CollectorUrl> for String {
    fn from(url: CollectorUrl) -> Self {
        format!("http://{}{}", url.authority, url.path)
    }
}

#[cfg(test)]
mod tests {
    use super::CollectorUrl;

    #[test]
    fn the_default_path_is_that_of_the_protocol() {
        for (text, address, path) in [
            ("http://localhost:4318", ("localhost", 4318), "/v1/traces"),
            ("http://[::1]:4318/", ("::1", 4318), "/v1/traces"),
            ("http://otel.local/custom/traces", ("otel.local", 80), "/custom/traces"),
        ] {
            let url: CollectorUrl = text.parse().expect(text);
            assert_eq!((url.address(), url.path()), (address, path));
            assert_eq!(String::from(url.clone()).parse(), Ok(url));
        }
        for bad in ["", "localhost:4318", "https://a:4318", "grpc://a", "/v1/traces", "http://"] {
            assert!(bad.parse::<CollectorUrl>().is_err(), "{bad:?}");
        }
    }
}
