//! Health endpoints of the router.

use std::time::Duration;

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::Shared;
use crate::{error::Error, fleet::registry};

/// 200 if a worker can serve. Clients of SGLang wait for it before they send requests.
pub(super) async fn health(State(router): Shared) -> Response {
    if registry::any_healthy(&router.registry.replicas(), None) {
        return alive().await.into_response();
    }
    Error::NoHealthyWorker { waited: Duration::ZERO }.into_response()
}

/// 200 while the process runs.
pub(super) async fn alive() -> &'static str {
    "ok\n"
}

pub(super) async fn readiness(State(router): Shared) -> Response {
    let replicas = router.registry.replicas();
    let healthy = replicas.iter().filter(|replica| replica.backend.is_in_rotation()).count();
    let ready = router.is_ready();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({
        "ready": ready,
        "draining": router.gate.is_draining(),
        "healthy_workers": healthy,
        "workers": replicas.len(),
    });
    (status, Json(body)).into_response()
}
