//! Who may do what. Decided on the route that will answer, never on a path as text: what does not
//! match a route does not get its rights either, however it is spelled.

use http::{HeaderMap, Method, header};
use subtle::{Choice, ConstantTimeEq};

use crate::{
    admin::dashboard,
    config::{ApiKey, Config},
    endpoint::Endpoint,
    error::Error,
    server::sites::Sites,
};

/// Routes that answer without a key, as a prober has none.
const PROBES: [&str; 4] = ["/health", "/health_generate", "/liveness", "/readiness"];

/// Whether a request to `endpoint` may pass: it has a key, or needs none and no web page has sent it that may
/// not. `route` is its path, for the routes of the router
/// itself; there, whole and unchanged, it is the route.
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
        // An admin key alone leaves the models open: it protects the router.
        (false, _, true) | (true, true, true) => return sites.check(endpoint, method, headers),
        (false, ..) | (true, true, false) => [admin, &config.api_key],
    };
    let sent = headers.get(header::AUTHORIZATION);
    let sent = sent.and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    let known = sent.is_some_and(|sent| is_one_of(sent, keys.into_iter().flatten()));
    if known { Ok(()) } else { Err(Error::Unauthorized) }
}

/// Probes, and the page of the dashboard, which says nothing: its data needs a key.
fn is_open(route: &str) -> bool {
    route == "/"
        || PROBES.contains(&route)
        || dashboard::FILES.iter().any(|file| file.path == route)
}

/// Takes as long for every key of one length: all are looked at, and each to its end. Else the time
/// to refuse a key would tell how much of it is right.
fn is_one_of<'a>(sent: &[u8], keys: impl Iterator<Item = &'a ApiKey>) -> bool {
    let found = keys.map(|key| sent.ct_eq(key.as_bytes()));
    found.fold(Choice::from(0), |any, this| any | this).into()
}
