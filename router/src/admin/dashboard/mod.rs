//! `/dashboard`: one page that shows what the router knows, and a chat box to try the model.
//!
//! The page is static and open to all; what it shows comes from `/dashboard/events`, for which the
//! page asks for the admin key.

mod events;

use axum::{
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
};

use super::Shared;
use events::Events;

/// Nothing but the page's own three files and the router's own answers: no inline script, no other
/// host, no frame around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'";

pub(super) async fn page() -> Response {
    file("text/html; charset=utf-8", include_str!("page.html"))
}

pub(super) async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("page.css"))
}

pub(super) async fn script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page.js"))
}

/// The router's statistics, at once and then every second, as server-sent events.
pub(super) async fn events(State(router): Shared) -> Response {
    let body = axum::body::Body::new(Events::new(router));
    (headers("text/event-stream"), body).into_response()
}

fn file(kind: &'static str, text: &'static str) -> Response {
    (headers(kind), text).into_response()
}

fn headers(kind: &'static str) -> HeaderMap {
    const ALL: [(HeaderName, &str); 4] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Another version of the router brings another page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    let all = ALL.into_iter().chain([(header::CONTENT_TYPE, kind)]);
    all.map(|(name, value)| (name, HeaderValue::from_static(value))).collect()
}
