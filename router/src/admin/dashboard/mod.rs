//! `/dashboard`: a page with the state of the router, and a chat to try the model.
//!
//! The page is static and needs no key. Its data comes from `/dashboard/events`, for which the page asks for the
//! admin key.

mod events;

use std::sync::Arc;

use axum::{
    Router as Routes,
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
    routing::get,
};

use super::Shared;
use crate::router::Router;
use events::Events;

/// The content security policy: only files and responses of the router, no inline script, no other host, no frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'";

/// A static file.
pub struct File {
    pub path: &'static str,
    pub content_type: &'static str,
    text: &'static str,
}

/// Declares a script of the page.
macro_rules! script {
    ($name:literal) => {
        File {
            path: concat!("/dashboard/", $name),
            content_type: "text/javascript; charset=utf-8",
            text: include_str!($name),
        }
    };
}

/// The static files. They contain no data, so they are served without a key.
pub const FILES: [File; 17] = [
    File {
        path: "/docs",
        content_type: "text/html; charset=utf-8",
        text: include_str!("../docs/page.html"),
    },
    File {
        path: "/docs/page.css",
        content_type: "text/css; charset=utf-8",
        text: include_str!("../docs/page.css"),
    },
    File {
        path: "/docs/page.js",
        content_type: "text/javascript; charset=utf-8",
        text: include_str!("../docs/page.js"),
    },
    File {
        path: "/dashboard",
        content_type: "text/html; charset=utf-8",
        text: include_str!("page.html"),
    },
    File {
        path: "/dashboard/page.css",
        content_type: "text/css; charset=utf-8",
        text: include_str!("page.css"),
    },
    File {
        path: "/dashboard/chat.css",
        content_type: "text/css; charset=utf-8",
        text: include_str!("chat.css"),
    },
    script!("page.js"),
    script!("chart.js"),
    script!("chat.js"),
    script!("dom.js"),
    script!("history.js"),
    script!("markdown.js"),
    script!("numbers.js"),
    script!("pictures.js"),
    script!("server.js"),
    script!("tiles.js"),
    script!("workers.js"),
];

/// Routes of the static files.
pub(super) fn files() -> Routes<Arc<Router>> {
    FILES.iter().fold(Routes::new(), |routes, file| {
        routes.route(file.path, get(async || (headers(file.content_type), file.text)))
    })
}

/// Sends statistics and history as server-sent events, at once and then every second.
pub(super) async fn events(State(router): Shared) -> Response {
    let body = axum::body::Body::new(Events::new(router));
    (headers("text/event-stream"), body).into_response()
}

fn headers(kind: &'static str) -> HeaderMap {
    const ALL: [(HeaderName, &str); 4] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Another version of the router has another page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    let all = ALL.into_iter().chain([(header::CONTENT_TYPE, kind)]);
    all.map(|(name, value)| (name, HeaderValue::from_static(value))).collect()
}
