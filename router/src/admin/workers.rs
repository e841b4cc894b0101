//! Endpoints for the set of workers: `/workers` as in SMG, and the three older endpoints of SGLang.

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
    fleet::{Replica, WorkerSpec, WorkerView, registry::backends},
    names::WorkerUrl,
    router::Router,
};

/// A worker that a client names, in the query or in a JSON body.
#[derive(Deserialize)]
pub(super) struct Target {
    url: String,
    api_key: Option<String>,
}

impl Target {
    fn from_json(body: &[u8]) -> Result<WorkerSpec, Error> {
        let target: Result<Self, _> = serde_json::from_slice(body);
        let bad = |error: serde_json::Error| Error::BadRequest {
            param: "url",
            message: format!("expected {{\"url\": \"http://HOST:PORT\"}}: {error}"),
        };
        target.map_err(bad)?.spec()
    }

    fn from_query(query: Result<Query<Self>, QueryRejection>) -> Result<WorkerSpec, Error> {
        let missing = |_| Error::BadRequest {
            param: "url",
            message: "expected ?url=http://HOST:PORT".to_owned(),
        };
        query.map_err(missing)?.0.spec()
    }

    fn spec(self) -> Result<WorkerSpec, Error> {
        let bad = |message| Error::BadRequest { param: "api_key", message };
        let api_key = self.api_key.map(|key| key.parse()).transpose().map_err(bad)?;
        Ok(WorkerSpec { url: WorkerUrl::from_client(&self.url)?, api_key })
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
    let replica = by_id(&router, &id)?;
    let url = &replica.backend.url;
    router.remove_worker(url)?;
    // The response shape of SMG.
    let body = json!({
        "status": "accepted",
        "worker_id": replica.id.0.to_string(),
        "message": "the worker gets no new requests and finishes its present ones",
        "removed": url,
    });
    Ok((StatusCode::ACCEPTED, Json(body)).into_response())
}

/// Finds a worker by its id or by its URL. Fails if it is unknown.
fn by_id(router: &Router, id: &str) -> Result<Arc<Replica>, Error> {
    let replicas = router.registry.replicas();
    let url: Option<WorkerUrl> = id.parse().ok();
    let is_it = |replica: &&Arc<Replica>| {
        let is_at = |url: &WorkerUrl| replica.backend.url == *url;
        replica.id.0.to_string() == id || url.as_ref().is_some_and(is_at)
    };
    replicas.iter().find(is_it).cloned().ok_or_else(|| Error::WorkerUnknown(id.to_owned()))
}

/// The requests on each worker, in SGLang's shape: `load` is their number.
pub(super) async fn loads(State(router): Shared) -> Json<Value> {
    let loads: Vec<Value> =
        router.registry.replicas().iter().map(|replica| load(replica)).collect();
    Json(json!({ "workers": loads }))
}

fn load(replica: &Replica) -> Value {
    json!({
        "worker": replica.name(),
        "load": replica.requests(),
        "pending_tokens": replica.pending_tokens(),
        "healthy": replica.backend.takes_requests(),
    })
}

/// The URLs of the workers, in the shape of SGLang v0.4.
pub(super) async fn list_urls(State(router): Shared) -> Json<Value> {
    let urls: Vec<String> =
        backends(&router.registry.replicas()).map(|backend| backend.url.to_string()).collect();
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
    let url = Target::from_query(query)?.url;
    router.remove_worker(&url)?;
    Ok(Json(json!({ "removed": url })))
}
