//! SGLang's admin endpoints, sent to every worker at once.

use std::sync::Arc;

use axum::{
    Json,
    body::Bytes,
    extract::State,
    http::{Method, StatusCode},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use tokio::{task::JoinSet, time::timeout};

use super::Shared;
use crate::{
    config::ApiKey,
    error::Error,
    fleet::{
        Backend,
        registry::{backends, replicas_of},
    },
    router::Router,
    upstream::call::Call,
};

/// The response of one worker.
struct Answer {
    backend: Arc<Backend>,
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
                "url": self.backend.url,
                "status": status.as_u16(),
                "response": self.json().unwrap_or_else(|| String::from_utf8_lossy(body).into()),
            }),
            Err(error) => json!({ "url": self.backend.url, "status": null, "error": error }),
        }
    }
}

/// Sends the request to every worker at once. Returns the responses in the order of the registry.
async fn ask_all(router: &Router, method: Method, path: &'static str, body: Bytes) -> Vec<Answer> {
    let limit = router.config.health_check_timeout_secs.get();
    let mut calls = JoinSet::new();
    for (place, backend) in backends(&router.registry.replicas()).cloned().enumerate() {
        let authorization = router.config.worker_admin_api_key.as_ref().map(ApiKey::bearer);
        let call = Call { method: method.clone(), path, body: body.clone(), authorization };
        calls.spawn(async move {
            let outcome = match timeout(limit, call.to(&backend.pool)).await {
                Ok(answered) => answered.map_err(|error| error.to_string()),
                Err(_) => Err(format!("no answer within {limit:?}")),
            };
            (place, Answer { backend, outcome })
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

/// Empties the prefix cache of every worker, and the part of the tree that belongs to it. A worker that fails
/// keeps both. Fails with Draining if the router ends before.
pub(super) async fn flush_cache(State(router): Shared, body: Bytes) -> Result<Response, Error> {
    // A task of its own goes on if the client leaves: the tree must forget whatever the workers have flushed.
    let flushing = tokio::spawn(async move {
        let answers = ask_all(&router, Method::POST, "/flush_cache", body).await;
        for answer in answers.iter().filter(|answer| answer.is_success()) {
            for replica in replicas_of(&router.registry.replicas(), &answer.backend) {
                replica.learned.forget(&router.tree, replica.id);
            }
        }
        answers
    });
    // An error means that the task was aborted with its runtime.
    let answers = flushing.await.map_err(|_| Error::Draining)?;
    let all = answers.iter().all(Answer::is_success);
    Ok(reports(if all { StatusCode::OK } else { StatusCode::BAD_GATEWAY }, &answers))
}

/// Aborts a request, or with `abort_all` all requests, those that wait in the router included. The router does not record
/// which worker has a request, so all workers are asked, and one success is enough.
pub(super) async fn abort_request(State(router): Shared, body: Bytes) -> Response {
    let fields = serde_json::from_slice::<Value>(&body).unwrap_or_default();
    if fields.get("abort_all").and_then(Value::as_bool) == Some(true) {
        // Waiting requests first: they would otherwise take the room that the aborts on the workers make.
        router.queue.abort_all();
    }
    let answers = ask_all(&router, Method::POST, "/abort_request", body).await;
    let refused = answers.iter().filter_map(|answer| answer.outcome.as_ref().ok());
    let status = if answers.iter().any(Answer::is_success) {
        StatusCode::OK
    } else {
        // The workers' own status, such as 400 for a bad body.
        refused.map(|(status, _)| *status).next().unwrap_or(StatusCode::BAD_GATEWAY)
    };
    reports(status, &answers)
}

pub(super) async fn start_profile(State(router): Shared, body: Bytes) -> Response {
    on_every_worker(&router, "/start_profile", body).await
}

pub(super) async fn stop_profile(State(router): Shared, body: Bytes) -> Response {
    on_every_worker(&router, "/stop_profile", body).await
}

pub(super) async fn start_expert_record(State(router): Shared, body: Bytes) -> Response {
    on_every_worker(&router, "/start_expert_distribution_record", body).await
}

pub(super) async fn stop_expert_record(State(router): Shared, body: Bytes) -> Response {
    on_every_worker(&router, "/stop_expert_distribution_record", body).await
}

pub(super) async fn dump_expert_record(State(router): Shared, body: Bytes) -> Response {
    on_every_worker(&router, "/dump_expert_distribution_record", body).await
}

/// Sends a request to every worker. The response has the error of each worker that failed.
async fn on_every_worker(router: &Router, path: &'static str, body: Bytes) -> Response {
    let answers = ask_all(router, Method::POST, path, body).await;
    let refused = answers.iter().filter_map(|answer| answer.outcome.as_ref().ok());
    let refused = refused.map(|(status, _)| *status).find(|status| !status.is_success());
    let all = answers.iter().all(Answer::is_success);
    reports(if all { StatusCode::OK } else { refused.unwrap_or(StatusCode::BAD_GATEWAY) }, &answers)
}

/// Server information of all workers, in the shape of one SGLang server: the states of all workers are in
/// `internal_states`.
pub(super) async fn server_info(State(router): Shared) -> Json<Value> {
    let answers = ask_all(&router, Method::GET, "/get_server_info", Bytes::new()).await;
    let mut states: Vec<Value> = Vec::new();
    let mut workers = Vec::new();
    for answer in &answers {
        if let Some(Value::Object(mut info)) = answer.json().filter(|_| answer.is_success()) {
            if let Some(Value::Array(own)) = info.get_mut("internal_states") {
                states.append(own);
            }
            info.remove("internal_states");
            info.insert("url".to_owned(), json!(answer.backend.url));
            workers.push(Value::Object(info));
        } else {
            workers.push(answer.report());
        }
    }
    // Clients of one server read its settings at the top level.
    let first = workers.iter().find_map(Value::as_object).filter(|info| info.contains_key("url"));
    let mut whole = first.cloned().unwrap_or_default();
    for report in ["url", "status", "response", "error"] {
        whole.remove(report);
    }
    let Value::Object(own) = json!({
        "router": {
            "version": env!("CARGO_PKG_VERSION"),
            "policy": router.policy.name(),
            "draining": router.gate.is_draining(),
            "requests_in_flight": router.gate.in_flight(),
        },
        "workers": workers,
        "internal_states": states,
    }) else {
        return Json(Value::Null);
    };
    whole.extend(own);
    Json(whole.into())
}

/// The loads of all workers, in the shape of the ranks of one SGLang server.
pub(super) async fn load(State(router): Shared) -> Json<Value> {
    let answers = ask_all(&router, Method::GET, "/get_load", Bytes::new()).await;
    let mut ranks = Vec::new();
    for answer in answers.iter().filter(|answer| answer.is_success()) {
        let Some(Value::Array(loads)) = answer.json() else { continue };
        for load in loads {
            let Value::Object(mut load) = load else { continue };
            load.insert("dp_rank".to_owned(), ranks.len().into());
            load.insert("worker".to_owned(), json!(answer.backend.url));
            ranks.push(Value::Object(load));
        }
    }
    Json(ranks.into())
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, pin::pin, task::Poll};

    use tokio::{net::TcpListener, runtime};

    use super::*;
    use crate::config::Config;

    #[test]
    fn a_flush_that_is_cut_off_by_the_end_of_its_runtime_is_refused() {
        let new =
            || runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (ending, other) = (new(), new());
        // Accepts connections and never answers.
        let worker = ending.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let url = format!("http://{}", worker.local_addr().expect("an address"));
        let config = Config { worker_urls: vec![url.parse().expect("a URL")], ..Config::default() };
        let entered = ending.enter();
        let router = Router::new(config).expect("a config to start with");
        drop(entered);
        let mut flushing = pin!(flush_cache(State(router), Bytes::new()));
        let begun = poll_fn(|cx| Poll::Ready(flushing.as_mut().poll(cx).is_pending()));
        assert!(ending.block_on(begun));
        drop(ending);
        let refused = other.block_on(flushing).expect_err("it was cut off");
        assert_eq!(refused, Error::Draining);
    }
}
