//! What clients of one SGLang server ask of it, asked of all of them.

use axum::{
    Json,
    body::Bytes,
    extract::State,
    http::{Method, StatusCode},
    response::Response,
};
use serde_json::{Value, json};

use super::{
    Shared,
    broadcast::{Answer, ask_all, reports},
};
use crate::router::Router;

/// Every worker's prefix cache and its share of the tree. A worker that did not flush keeps both.
pub(super) async fn flush_cache(State(router): Shared, body: Bytes) -> Response {
    let answers = ask_all(&router, Method::POST, "/flush_cache", body).await;
    for answer in answers.iter().filter(|answer| answer.is_success()) {
        answer.worker.learned.forget(&router.tree, answer.worker.id);
    }
    let all = answers.iter().all(Answer::is_success);
    reports(if all { StatusCode::OK } else { StatusCode::BAD_GATEWAY }, &answers)
}

/// Only one worker knows the request, and the router does not keep which: it is enough that one
/// worker has taken note.
pub(super) async fn abort_request(State(router): Shared, body: Bytes) -> Response {
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

/// A trace of every worker; those that did not begin one say why.
pub(super) async fn start_profile(State(router): Shared, body: Bytes) -> Response {
    profile(&router, "/start_profile", body).await
}

pub(super) async fn stop_profile(State(router): Shared, body: Bytes) -> Response {
    profile(&router, "/stop_profile", body).await
}

async fn profile(router: &Router, path: &'static str, body: Bytes) -> Response {
    let answers = ask_all(router, Method::POST, path, body).await;
    let refused = answers.iter().filter_map(|answer| answer.outcome.as_ref().ok());
    let refused = refused.map(|(status, _)| *status).find(|status| !status.is_success());
    let all = answers.iter().all(Answer::is_success);
    reports(if all { StatusCode::OK } else { refused.unwrap_or(StatusCode::BAD_GATEWAY) }, &answers)
}

/// All workers' states in the place where clients of one SGLang server look for one.
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
            info.insert("url".to_owned(), json!(answer.worker.url));
            workers.push(Value::Object(info));
        } else {
            workers.push(answer.report());
        }
    }
    // Clients of one server read its settings at the top.
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

/// The loads of all workers as those of the ranks of one SGLang server.
pub(super) async fn load(State(router): Shared) -> Json<Value> {
    let answers = ask_all(&router, Method::GET, "/get_load", Bytes::new()).await;
    let mut ranks = Vec::new();
    for answer in answers.iter().filter(|answer| answer.is_success()) {
        let Some(Value::Array(loads)) = answer.json() else { continue };
        for mut load in loads {
            load["dp_rank"] = ranks.len().into();
            load["worker"] = json!(answer.worker.url);
            ranks.push(load);
        }
    }
    Json(ranks.into())
}
