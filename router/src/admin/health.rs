//! Whether the router lives, and whether it can serve.

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::Shared;

/// The process answers; whether it can serve is `/readiness`.
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
