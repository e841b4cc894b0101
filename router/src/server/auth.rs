//! Authorization. The route that answers decides, never the text of a path. So another spelling of a path cannot
//! bypass a check.

use http::{HeaderMap, HeaderValue, Method, header};
use subtle::{Choice, ConstantTimeEq};

use crate::{
    admin::dashboard,
    config::{ApiKey, Config},
    endpoint::Endpoint,
    error::Error,
    server::sites::Sites,
    wire::headers::X_API_KEY,
};

/// Routes that answer without a key: health probes have none.
const PROBES: [&str; 4] = ["/health", "/health_generate", "/liveness", "/readiness"];

/// The scheme of the keys in `Authorization`.
const SCHEME: &[u8] = b"Bearer ";

/// Checks whether a request to `endpoint` may pass: it has a valid key, or needs none and comes from no foreign web
/// page. `route` is its path; for the router's own endpoints it equals the route. Fails with `Unauthorized`,
/// `ForeignHost` or `ForeignOrigin`.
pub(super) fn check(
    config: &Config,
    endpoint: Endpoint,
    route: &str,
    (method, headers): (&Method, &HeaderMap),
    sites: &Sites,
) -> Result<(), Error> {
    let own = endpoint == Endpoint::Admin;
    let admin = config.admin_api_key.as_slice();
    let keys: [&[ApiKey]; 2] = match (own, admin.is_empty(), config.api_key.is_empty()) {
        (true, ..) if is_open(route) => return Ok(()),
        (true, false, _) => [admin, &[]],
        // If only an admin key is set, it protects the admin routes; the models need no key.
        (false, _, true) | (true, true, true) => return sites.check(endpoint, method, headers),
        (false, ..) | (true, true, false) => [admin, &config.api_key],
    };
    let known = key_of(headers).is_some_and(|sent| is_one_of(sent, keys.into_iter().flatten()));
    if known { Ok(()) } else { Err(Error::Unauthorized) }
}

/// The key of a request, in the form of OpenAI's clients or of Anthropic's.
fn key_of(headers: &HeaderMap) -> Option<&[u8]> {
    match headers.get(header::AUTHORIZATION) {
        Some(value) => {
            // RFC 9110 11.1: the case of a scheme means nothing.
            let (scheme, key) = value.as_bytes().split_at_checked(SCHEME.len())?;
            scheme.eq_ignore_ascii_case(SCHEME).then_some(key)
        }
        None => headers.get(X_API_KEY).map(HeaderValue::as_bytes),
    }
}

/// Whether a route needs no key: probes, and the static files of the dashboard, whose data needs a key.
fn is_open(route: &str) -> bool {
    route == "/"
        || PROBES.contains(&route)
        || dashboard::FILES.iter().any(|file| file.path == route)
}

/// Compares in constant time: all keys, each to its end. Otherwise the time of a refusal would reveal how many bytes
/// of a key are right.
fn is_one_of<'a>(sent: &[u8], keys: impl Iterator<Item = &'a ApiKey>) -> bool {
    let found = keys.map(|key| sent.ct_eq(key.as_bytes()));
    found.fold(Choice::from(0), |any, this| any | this).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_case_of_the_scheme_means_nothing() {
        for (sent, key) in [
            ("Bearer k", Some(&b"k"[..])),
            ("bearer k", Some(b"k")),
            ("BEARER K", Some(b"K")),
            ("Basic k", None),
            ("Bearer", None),
            ("Bearerk", None),
        ] {
            let headers = [(header::AUTHORIZATION, HeaderValue::from_static(sent))];
            assert_eq!(key_of(&HeaderMap::from_iter(headers)), key, "{sent}");
        }
    }
}
