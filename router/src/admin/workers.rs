//! The set of workers: `/workers` as in SMG, and the three older routes of SGLang.

use std::sync::Arc;

use axum::{
    Json,
    body::Bytes,
    extract::{Path, Query, State, rejection::QueryRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Shared;
use crate::{
    error::Error,
    fleet::worker::{Worker, WorkerView},
    names::WorkerUrl,
    router::Router,
};

/// A worker's address, in the query or in a JSON body.
#[derive(Deserialize)]
pub(super) struct Target {
    url: String,
}

impl Target {
    fn from_json(body: &[u8]) -> Result<WorkerUrl, Error> {
        let target: Result<Self, _> = serde_json::from_slice(body);
        let bad = |error: serde_json::Error| Error::BadRequest {
            param: "url",
            message: format!("expected {{\"url\": \"http://HOST:PORT\"}}: {error}"),
        };
        WorkerUrl::from_client(&target.map_err(bad)?.url)
    }

    fn from_query(query: Result<Query<Self>, QueryRejection>) -> Result<WorkerUrl, Error> {
        let missing = |_| Error::BadRequest {
            param: "url",
            message: "expected ?url=http://HOST:PORT".to_owned(),
        };
        WorkerUrl::from_client(&query.map_err(missing)?.url)
    }
}

pub(super) async fn list(State(router): Shared) -> Json<Value> {
    let workers = router.registry.views();
    Json(json!({ "workers": workers, "total": workers.len() }))
}

pub(super) async fn register(State(router): Shared, body: Bytes) -> Result<Response, Error> {
    let worker = router.add_named_worker(Target::from_json(&body)?).await?;
    Ok((StatusCode::ACCEPTED, Json(worker.view())).into_response())
}

pub(super) async fn show(
    State(router): Shared,
    Path(id): Path<String>,
) -> Result<Json<WorkerView>, Error> {
    Ok(Json(by_id(&router, &id)?.view()))
}

pub(super) async fn remove(
    State(router): Shared,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    let worker = by_id(&router, &id)?;
    router.remove_worker(&worker.url)?;
    // SMG's shape.
    let body = json!({
        "status": "accepted",
        "worker_id": worker.id.0.to_string(),
        "message": "it gets no more requests, and finishes those that it has",
        "removed": worker.url,
    });
    Ok((StatusCode::ACCEPTED, Json(body)).into_response())
}

/// By its number or by its URL.
fn by_id(router: &Router, id: &str) -> Result<Arc<Worker>, Error> {
    let workers = router.registry.workers();
    let url: Option<WorkerUrl> = id.parse().ok();
    let is_it = |worker: &&Arc<Worker>| {
        worker.id.0.to_string() == id || url.as_ref().is_some_and(|url| worker.url == *url)
    };
    workers.iter().find(is_it).cloned().ok_or_else(|| Error::WorkerUnknown(id.to_owned()))
}

/// What the router has booked on each worker. SGLang's shape; it calls the outstanding requests load.
pub(super) async fn loads(State(router): Shared) -> Json<Value> {
    let loads: Vec<Value> = router.registry.workers().iter().map(|worker| load(worker)).collect();
    Json(json!({ "workers": loads }))
}

fn load(worker: &Worker) -> Value {
    json!({
        "worker": worker.url,
        "load": worker.requests(),
        "pending_tokens": worker.pending_tokens(),
        "healthy": worker.takes_requests(),
    })
}

/// SGLang v0.4's shape of the three.
pub(super) async fn list_urls(State(router): Shared) -> Json<Value> {
    let urls: Vec<String> =
        router.registry.workers().iter().map(|worker| worker.url.to_string()).collect();
    Json(json!({ "urls": urls }))
}

pub(super) async fn add_worker(
    State(router): Shared,
    query: Result<Query<Target>, QueryRejection>,
) -> Result<Json<WorkerView>, Error> {
    let worker = router.add_named_worker(Target::from_query(query)?).await?;
    Ok(Json(worker.view()))
}

pub(super) async fn remove_worker(
    State(router): Shared,
    query: Result<Query<Target>, QueryRejection>,
) -> Result<Json<Value>, Error> {
    let url = Target::from_query(query)?;
    router.remove_worker(&url)?;
    Ok(Json(json!({ "removed": url })))
}
