//! The endpoints that the router answers itself: workers, health, metrics, the dashboard, and requests to all workers.

pub mod dashboard;
mod engine;
mod health;
pub mod metrics;
mod openapi;
mod workers;

use std::sync::Arc;

use axum::{
    Router as Routes,
    extract::State,
    http::{HeaderMap, Uri, header},
    response::{IntoResponse, Redirect, Response},
    routing::{get, post},
};

use crate::{error::Error, router::Router};

type Shared = State<Arc<Router>>;

pub fn routes(router: Arc<Router>) -> Routes {
    Routes::new()
        .route("/", get(index))
        .route("/openapi.json", get(openapi::openapi))
        .route("/health", get(health::health))
        .route("/health_generate", get(health::health))
        .route("/liveness", get(health::alive))
        .route("/readiness", get(health::readiness))
        .route("/metrics", get(metrics_page))
        .merge(dashboard::files())
        .route("/dashboard/events", get(dashboard::events))
        .route(
            "/workers",
            get(workers::list).post(workers::register).delete(workers::remove_worker),
        )
        .route("/workers/{id}", get(workers::show).delete(workers::remove))
        .route("/get_loads", get(workers::loads))
        .route("/get_load", get(engine::load))
        .route("/list_workers", get(workers::list_urls))
        .route("/add_worker", post(workers::add_worker))
        .route("/remove_worker", post(workers::remove_worker))
        .route("/flush_cache", post(engine::flush_cache))
        .route("/abort_request", post(engine::abort_request))
        .route("/start_profile", post(engine::start_profile))
        .route("/stop_profile", post(engine::stop_profile))
        .route("/start_expert_distribution_record", post(engine::start_expert_record))
        .route("/stop_expert_distribution_record", post(engine::stop_expert_record))
        .route("/dump_expert_distribution_record", post(engine::dump_expert_record))
        .route("/get_server_info", get(engine::server_info))
        .route("/server_info", get(engine::server_info))
        .fallback(async |uri: Uri| Error::NotFound(uri.path().to_owned()))
        // axum adds the Allow header.
        .method_not_allowed_fallback(async || Error::MethodNotAllowed { allow: None })
        .with_state(router)
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        self.to_response().map(axum::body::Body::new)
    }
}

/// Redirects browsers to the dashboard.
async fn index(headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    if accept.is_some_and(|accept| accept.contains("text/html")) {
        return Redirect::temporary("/dashboard").into_response();
    }
    Error::NotFound("/".to_owned()).into_response()
}

async fn metrics_page(State(router): Shared) -> impl IntoResponse {
    let content_type = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], metrics::render(&router))
}
