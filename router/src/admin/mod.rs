//! The routes that the router answers itself: workers, health, metrics, and requests that concern
//! every worker.

use std::sync::Arc;

use axum::{
    Json, Router as Routes,
    body::Bytes,
    extract::{Query, State, rejection::QueryRejection},
    http::{Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{task::JoinSet, time::timeout};

use crate::{
    error::Error,
    fleet::{
        worker::{Phase, Worker, WorkerView},
        worker_url::WorkerUrl,
    },
    router::Router,
    upstream::call::Call,
};

type Shared = State<Arc<Router>>;

pub fn routes(router: Arc<Router>) -> Routes {
    Routes::new()
        .route("/health", get(alive))
        .route("/liveness", get(alive))
        .route("/readiness", get(readiness))
        .route("/metrics", get(metrics))
        .route("/workers", get(list).post(register).delete(unregister))
        .route("/list_workers", get(list_urls))
        .route("/add_worker", post(add_worker))
        .route("/remove_worker", post(remove_worker))
        .route("/flush_cache", post(flush_cache))
        .route("/abort_request", post(abort_request))
        .route("/get_server_info", get(server_info))
        .fallback(async |uri: Uri| Error::NotFound(uri.path().to_owned()))
        // axum itself adds which methods are allowed.
        .method_not_allowed_fallback(async || Error::MethodNotAllowed { allow: None })
        .with_state(router)
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        self.to_response().map(axum::body::Body::new)
    }
}

/// A worker's address, in the query or in a JSON body.
#[derive(Deserialize)]
struct Target {
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

/// The process answers; whether it can serve is `/readiness`.
async fn alive() -> &'static str {
    "ok\n"
}

async fn readiness(State(router): Shared) -> Response {
    let workers = router.registry.workers();
    let healthy = workers.iter().filter(|worker| worker.phase() == Phase::Healthy).count();
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

async fn metrics(State(router): Shared) -> impl IntoResponse {
    let content_type = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], router.metrics.render(&router))
}

async fn list(State(router): Shared) -> Json<Value> {
    let workers = router.registry.views();
    Json(json!({ "workers": workers, "total": workers.len() }))
}

async fn register(State(router): Shared, body: Bytes) -> Result<Response, Error> {
    let worker = router.add_named_worker(Target::from_json(&body)?).await?;
    Ok((StatusCode::ACCEPTED, Json(worker.view())).into_response())
}

async fn unregister(
    State(router): Shared,
    query: Result<Query<Target>, QueryRejection>,
) -> Result<Json<Value>, Error> {
    remove_worker(State(router), query).await
}

/// SGLang v0.4's shape of the three.
async fn list_urls(State(router): Shared) -> Json<Value> {
    let urls: Vec<String> =
        router.registry.workers().iter().map(|worker| worker.url.to_string()).collect();
    Json(json!({ "urls": urls }))
}

async fn add_worker(
    State(router): Shared,
    query: Result<Query<Target>, QueryRejection>,
) -> Result<Json<WorkerView>, Error> {
    let worker = router.add_named_worker(Target::from_query(query)?).await?;
    Ok(Json(worker.view()))
}

async fn remove_worker(
    State(router): Shared,
    query: Result<Query<Target>, QueryRejection>,
) -> Result<Json<Value>, Error> {
    let url = Target::from_query(query)?;
    router.remove_worker(&url)?;
    Ok(Json(json!({ "removed": url })))
}

/// One worker's answer to a request that went to all.
struct Answer {
    worker: Arc<Worker>,
    outcome: Result<(StatusCode, Bytes), String>,
}

impl Answer {
    fn is_success(&self) -> bool {
        matches!(&self.outcome, Ok((status, _)) if status.is_success())
    }

    fn json(&self) -> Option<Value> {
        self.outcome.as_ref().ok().and_then(|(_, body)| serde_json::from_slice(body).ok())
    }

    fn report(&self) -> Value {
        match &self.outcome {
            Ok((status, body)) => json!({
                "url": self.worker.url,
                "status": status.as_u16(),
                "response": self.json().unwrap_or_else(|| String::from_utf8_lossy(body).into()),
            }),
            Err(error) => json!({ "url": self.worker.url, "status": null, "error": error }),
        }
    }
}

/// Asks every worker at once; the answers come in the registry's order.
async fn ask_all(router: &Router, method: Method, path: &'static str, body: Bytes) -> Vec<Answer> {
    let limit = router.config.health_check_timeout_secs.get();
    let mut calls = JoinSet::new();
    for (place, worker) in router.registry.workers().iter().cloned().enumerate() {
        let call = Call { method: method.clone(), path, body: body.clone() };
        calls.spawn(async move {
            let outcome = match timeout(limit, call.to(&worker)).await {
                Ok(answered) => answered.map_err(|error| error.to_string()),
                Err(_) => Err(format!("no answer within {limit:?}")),
            };
            (place, Answer { worker, outcome })
        });
    }
    let mut answers = calls.join_all().await;
    answers.sort_unstable_by_key(|(place, _)| *place);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

fn reports(status: StatusCode, answers: &[Answer]) -> Response {
    let workers: Vec<Value> = answers.iter().map(Answer::report).collect();
    (status, Json(json!({ "success": status.is_success(), "workers": workers }))).into_response()
}

/// Every worker's prefix cache and its share of the tree. A worker that did not flush keeps both.
async fn flush_cache(State(router): Shared, body: Bytes) -> Response {
    let answers = ask_all(&router, Method::POST, "/flush_cache", body).await;
    for answer in answers.iter().filter(|answer| answer.is_success()) {
        router.tree.purge_worker(answer.worker.id);
    }
    let all = answers.iter().all(Answer::is_success);
    reports(if all { StatusCode::OK } else { StatusCode::BAD_GATEWAY }, &answers)
}

/// Only one worker knows the request, and the router does not keep which: it is enough that one
/// worker has taken note.
async fn abort_request(State(router): Shared, body: Bytes) -> Response {
    let answers = ask_all(&router, Method::POST, "/abort_request", body).await;
    let refused = answers.iter().filter_map(|answer| answer.outcome.as_ref().ok());
    let status = if answers.iter().any(Answer::is_success) {
        StatusCode::OK
    } else {
        // Their own word if they agree to refuse it, such as 400 for a bad body.
        refused.map(|(status, _)| *status).next().unwrap_or(StatusCode::BAD_GATEWAY)
    };
    reports(status, &answers)
}

/// All workers' states in the place where clients of one SGLang server look for one.
async fn server_info(State(router): Shared) -> Json<Value> {
    let answers = ask_all(&router, Method::GET, "/get_server_info", Bytes::new()).await;
    let mut states: Vec<Value> = Vec::new();
    let mut workers = Vec::new();
    for answer in &answers {
        if let Some(Value::Object(mut info)) = answer.json().filter(|_| answer.is_success()) {
            if let Some(Value::Array(own)) = info.get_mut("internal_states") {
                states.append(own);
            }
            info.remove("internal_states");
            info.insert("url".to_owned(), json!(answer.worker.url));
            workers.push(Value::Object(info));
        } else {
            workers.push(answer.report());
        }
    }
    Json(json!({
        "router": {
            "version": env!("CARGO_PKG_VERSION"),
            "policy": router.policy.name(),
            "draining": router.gate.is_draining(),
            "requests_in_flight": router.gate.in_flight(),
        },
        "workers": workers,
        "internal_states": states,
    }))
}
