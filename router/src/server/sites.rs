//! Protection against web pages that send requests from the browser of their reader.
//!
//! A page of any site can send requests to a router on the machine of its reader. With a key this is harmless, because no
//! browser adds a key by itself. Without a key the router makes two checks. The origin of the page must be the router's
//! own or an allowed one (against cross-site request forgery). And the host name in a request to a router on loopback
//! must be a name of the router (against DNS rebinding: the name of a site resolves to 127.0.0.1, so its pages have the
//! origin of the router).

use std::net::{IpAddr, SocketAddr};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header, request::Parts,
};
use http_body_util::Full;

use crate::{
    config::{AllowedHost, AllowedOrigin, Config},
    endpoint::Endpoint,
    error::Error,
    wire::headers::find,
};

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const REQUEST_PRIVATE_NETWORK: HeaderName =
    HeaderName::from_static("access-control-request-private-network");
const ALLOW_PRIVATE_NETWORK: HeaderName =
    HeaderName::from_static("access-control-allow-private-network");

/// Seconds for which a browser may cache a permission.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// The allowed origins and host names.
pub(super) struct Sites {
    origins: Vec<AllowedOrigin>,
    /// Whether pages of all origins may use the models. Admin routes are excluded.
    any_origin: bool,
    /// Host names of the router; `None` allows any.
    hosts: Option<Vec<AllowedHost>>,
}

impl Sites {
    /// For a router that listens at `address`.
    pub(super) fn new(config: &Config, address: SocketAddr) -> Self {
        let mut hosts = config.allowed_hosts.clone();
        let guarded = !hosts.is_empty() || address.ip().to_canonical().is_loopback();
        let any_host = hosts.iter().any(AllowedHost::is_any);
        hosts.extend(config.host.parse());
        Self {
            origins: config.cors_allowed_origins.clone(),
            any_origin: config.cors_allowed_origins.iter().any(AllowedOrigin::is_any),
            hosts: (guarded && !any_host).then_some(hosts),
        }
    }

    /// Checks a request to an endpoint without a key. Fails with `ForeignHost` or `ForeignOrigin`.
    pub(super) fn check(
        &self,
        endpoint: Endpoint,
        method: &Method,
        headers: &HeaderMap,
    ) -> Result<(), Error> {
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
        if let (Some(hosts), Some(host)) = (&self.hosts, host)
            && !is_own(host, hosts)
        {
            return Err(Error::ForeignHost(name_of(host).to_owned()));
        }
        let Some(origin) = headers.get(header::ORIGIN) else {
            // A browser sends at least this field with an unsafe request.
            let site = find(headers, &FETCH_SITE).filter(|_| !method.is_safe());
            return match site.map(HeaderValue::as_bytes) {
                None | Some(b"same-origin" | b"none") => Ok(()),
                Some(_) => Err(Error::ForeignOrigin("another site".to_owned())),
            };
        };
        let is_same = host.is_some_and(|host| is_at(origin.as_bytes(), host));
        if is_same || self.allows(endpoint, origin) {
            return Ok(());
        }
        Err(foreign(origin))
    }

    fn allows(&self, endpoint: Endpoint, origin: &HeaderValue) -> bool {
        self.any_origin && endpoint != Endpoint::Admin
            || self.origins.iter().any(|allowed| allowed.is(origin.as_bytes()))
    }

    /// The origin of a request to the models, if its pages may read the response.
    pub(super) fn reader(&self, endpoint: Endpoint, headers: &HeaderMap) -> Option<HeaderValue> {
        if self.origins.is_empty() || endpoint == Endpoint::Admin {
            return None;
        }
        headers.get(header::ORIGIN).filter(|origin| self.allows(endpoint, origin)).cloned()
    }

    /// Answers a CORS preflight for the models. `None` if the request is not a preflight.
    pub(super) fn preflight(
        &self,
        request: &Parts,
    ) -> Option<Result<Response<Full<Bytes>>, Error>> {
        if self.origins.is_empty() || request.method != Method::OPTIONS {
            return None;
        }
        let headers = &request.headers;
        let origin = headers.get(header::ORIGIN)?;
        let method = headers.get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
        let asked = Method::from_bytes(method.as_bytes()).ok()?;
        let endpoint = Endpoint::of(&asked, request.uri.path()).ok()?;
        if endpoint == Endpoint::Admin {
            return None;
        }
        if !self.allows(endpoint, origin) {
            return Some(Err(foreign(origin)));
        }
        let mut response = Response::new(Full::default());
        *response.status_mut() = StatusCode::NO_CONTENT;
        let given = response.headers_mut();
        given.insert(header::ACCESS_CONTROL_ALLOW_METHODS, method.clone());
        if let Some(names) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            given.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
        }
        if headers.contains_key(REQUEST_PRIVATE_NETWORK) {
            given.insert(ALLOW_PRIVATE_NETWORK, HeaderValue::from_static("true"));
        }
        given.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        Some(Ok(response))
    }
}

/// Lets pages of `origin` read a response.
pub(super) fn allow_reading(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    // A cache must not serve the permission of one origin to another.
    headers.append(header::VARY, HeaderValue::from_static("origin"));
}

fn foreign(origin: &HeaderValue) -> Error {
    Error::ForeignOrigin(String::from_utf8_lossy(origin.as_bytes()).into_owned())
}

/// The host name without its port.
fn name_of(host: &str) -> &str {
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.split_once(':').map_or(host, |(name, _)| name),
    }
}

/// Whether `host` is a name of this router: an address, localhost, or an allowed name. A site cannot make its own
/// name an address.
fn is_own(host: &str, allowed: &[AllowedHost]) -> bool {
    let name = name_of(host).trim_end_matches('.');
    let is_localhost = name
        .len()
        .checked_sub("localhost".len())
        .and_then(|start| Some((name.get(..start)?, name.get(start..)?)))
        .is_some_and(|(before, last)| {
            last.eq_ignore_ascii_case("localhost") && (before.is_empty() || before.ends_with('.'))
        });
    is_localhost || allowed.iter().any(|host| host.is(name)) || name.parse::<IpAddr>().is_ok()
}

/// Whether pages from `host` have this origin.
fn is_at(origin: &[u8], host: &str) -> bool {
    let authority = [&b"http://"[..], b"https://"].iter().find_map(|s| origin.strip_prefix(*s));
    authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_names_are_addresses_localhost_and_allowed_names() {
        let allowed = ["router.example".parse().expect("a name")];
        for host in [
            "127.0.0.1",
            "127.0.0.1:30000",
            "[::1]:30000",
            "10.0.0.1",
            "localhost",
            "LocalHost.:80",
            "a.localhost:1",
            "Router.Example:30000",
        ] {
            assert!(is_own(host, &allowed), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:30000",
            "notlocalhost",
            "localhost.evil",
            "127.0.0.1.nip.io",
        ] {
            assert!(!is_own(host, &allowed), "{host}");
        }
    }
}
