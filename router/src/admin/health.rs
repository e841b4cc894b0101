//! Whether the router lives, and whether it can serve.

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

/// Whether a worker can serve: what clients of one SGLang server wait for before they send a request.
pub(super) async fn health(State(router): Shared) -> Response {
    if registry::any_healthy(&router.registry.workers(), None) {
        return alive().await.into_response();
    }
    Error::NoHealthyWorker { waited: Duration::ZERO }.into_response()
}

/// The process answers; whether it can serve is `/health` and `/readiness`.
pub(super) async fn alive() -> &'static str {
    "ok\n"
}

pub(super) async fn readiness(State(router): Shared) -> Response {
    let workers = router.registry.workers();
    let healthy = workers.iter().filter(|worker| worker.is_in_rotation()).count();
    let ready = router.is_ready();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({
        "ready": ready,
        "draining": router.gate.is_draining(),
        "healthy_workers": healthy,
        "workers": workers.len(),
    });
    (status, Json(body)).into_response()
}
