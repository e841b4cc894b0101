//! Requests that go to every worker at once.

use std::sync::Arc;

use axum::{
    Json,
    body::Bytes,
    http::{Method, StatusCode},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use tokio::{task::JoinSet, time::timeout};

use crate::{config::ApiKey, fleet::worker::Worker, router::Router, upstream::call::Call};

/// One worker's answer to a request that went to all.
pub(super) struct Answer {
    pub(super) worker: Arc<Worker>,
    pub(super) outcome: Result<(StatusCode, Bytes), String>,
}

impl Answer {
    pub(super) fn is_success(&self) -> bool {
        matches!(&self.outcome, Ok((status, _)) if status.is_success())
    }

    pub(super) fn json(&self) -> Option<Value> {
        self.outcome.as_ref().ok().and_then(|(_, body)| serde_json::from_slice(body).ok())
    }

    pub(super) fn report(&self) -> Value {
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
pub(super) async fn ask_all(
    router: &Router,
    method: Method,
    path: &'static str,
    body: Bytes,
) -> Vec<Answer> {
    let limit = router.config.health_check_timeout_secs.get();
    let mut calls = JoinSet::new();
    for (place, worker) in router.registry.workers().iter().cloned().enumerate() {
        let authorization = router.config.worker_admin_api_key.as_ref().map(ApiKey::bearer);
        let call = Call { method: method.clone(), path, body: body.clone(), authorization };
        calls.spawn(async move {
            let outcome = match timeout(limit, call.to(&worker.pool)).await {
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

pub(super) fn reports(status: StatusCode, answers: &[Answer]) -> Response {
    let workers: Vec<Value> = answers.iter().map(Answer::report).collect();
    (status, Json(json!({ "success": status.is_success(), "workers": workers }))).into_response()
}
