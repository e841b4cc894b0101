//! `/openapi.json`: the router's own endpoints, and the endpoints of a worker that the router passes on.

use axum::{Json, extract::State};
use http::Method;
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::Shared;
use crate::{endpoint::Endpoint, fleet::registry::backends, router::Router, upstream::call::Call};

/// The router's own endpoints. A test compares them with the registered routes.
const OWN: [(&str, &str, &str); 32] = [
    ("get", "/", "Redirects browsers to the dashboard."),
    ("get", "/docs", "A page that shows this document."),
    ("get", "/openapi.json", "This document."),
    ("get", "/dashboard", "A page with workers, load and a chat."),
    ("get", "/dashboard/events", "The statistics of the dashboard, as server-sent events."),
    ("get", "/health", "200 if a worker can serve, else 503."),
    ("get", "/health_generate", "The same as /health."),
    ("get", "/liveness", "200 while the router runs."),
    ("get", "/readiness", "200 if a worker can serve and the router is not draining."),
    ("get", "/metrics", "Metrics in Prometheus' text format."),
    ("get", "/workers", "The workers."),
    ("post", "/workers", "Adds a worker: {\"url\": \"http://HOST:PORT\"}."),
    ("delete", "/workers", "Removes the worker of ?url=."),
    ("get", "/workers/{id}", "One worker, by its id or its percent-encoded URL."),
    ("delete", "/workers/{id}", "Removes a worker. Its requests in flight finish."),
    ("get", "/get_loads", "The requests that the router has on each worker."),
    ("get", "/get_load", "The load that each worker reports."),
    ("get", "/list_workers", "The URLs of the workers."),
    ("post", "/add_worker", "Adds the worker of ?url=."),
    ("post", "/remove_worker", "Removes the worker of ?url=."),
    ("post", "/flush_cache", "Empties the prefix caches of all workers."),
    ("post", "/abort_request", "Aborts a request on its worker, or all requests."),
    ("post", "/start_profile", "Begins a trace on all workers."),
    ("post", "/stop_profile", "Writes the traces."),
    (
        "post",
        "/start_expert_distribution_record",
        "Begins a record of the load of experts on all workers.",
    ),
    ("post", "/stop_expert_distribution_record", "Ends the records."),
    ("post", "/dump_expert_distribution_record", "Writes the record of each worker to a file."),
    ("get", "/get_server_info", "Settings, limits and load of all workers."),
    ("get", "/server_info", "The same as /get_server_info."),
    ("get", "/v1/models", "The served models."),
    ("get", "/v1/models/{model}", "One model."),
    ("get", "/get_model_info", "The model of a worker."),
];

pub(super) async fn openapi(State(router): Shared) -> Json<Value> {
    let mut document = of_a_worker(&router).await.unwrap_or_default();
    let workers = match document.remove("paths") {
        Some(Value::Object(paths)) => paths,
        _ => Map::new(),
    };
    let mut paths = Map::new();
    for (path, methods) in workers {
        let Value::Object(methods) = methods else { continue };
        let passed = |method: &str| is_forwarded(method, &path);
        let methods: Map<_, _> = methods.into_iter().filter(|(name, _)| passed(name)).collect();
        if !methods.is_empty() {
            paths.insert(path, methods.into());
        }
    }
    for (method, path, summary) in OWN {
        let methods = paths.entry(path).or_insert_with(|| json!({}));
        if let Some(methods) = methods.as_object_mut() {
            methods.entry(method).or_insert_with(|| operation(path, summary));
        }
    }
    document.entry("openapi").or_insert_with(|| "3.1.0".into());
    let version = env!("CARGO_PKG_VERSION");
    document.insert("info".to_owned(), json!({ "title": "mla-router", "version": version }));
    document.insert("paths".to_owned(), paths.into());
    Json(document.into())
}

/// Returns an operation of the router itself. The names in braces in `path` are its parameters.
fn operation(path: &str, summary: &str) -> Value {
    let names = path.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let parameters: Vec<_> = names
        .map(|name| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } }))
        .collect();
    let responses = json!({ "default": { "description": "" } });
    json!({ "summary": summary, "parameters": parameters, "responses": responses })
}

/// Whether the router passes such a request on to a worker.
fn is_forwarded(method: &str, path: &str) -> bool {
    let method = Method::from_bytes(method.to_ascii_uppercase().as_bytes());
    let endpoint = method.ok().and_then(|method| Endpoint::of(&method, path).ok());
    endpoint.is_some_and(|endpoint| !matches!(endpoint, Endpoint::Admin | Endpoint::OpenApi))
}

/// Returns the document of the first worker that has one.
async fn of_a_worker(router: &Router) -> Option<Map<String, Value>> {
    let limit = router.config.health_check_timeout_secs.get();
    let replicas = router.registry.replicas().clone();
    for backend in backends(&replicas).filter(|backend| backend.is_in_rotation()) {
        if let Ok(Ok((status, body))) =
            timeout(limit, Call::get("/openapi.json").to(&backend.pool)).await
            && status.is_success()
            && let Ok(document) = serde_json::from_slice(&body)
        {
            return Some(document);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_route_of_the_router_is_in_the_document() {
        let source = include_str!("mod.rs");
        let registered: BTreeSet<_> = source
            .split(".route(")
            .skip(1)
            .filter_map(|route| route.trim_start().strip_prefix('"')?.split('"').next())
            .collect();
        let documented: BTreeSet<_> = OWN.iter().map(|(_, path, _)| *path).collect();
        let missing: Vec<_> = registered.difference(&documented).collect();
        assert!(missing.is_empty(), "{missing:?}");
        for (method, path, _) in OWN {
            let is_own = registered.contains(path) || matches!(path, "/docs" | "/dashboard");
            assert!(is_own || is_forwarded(method, path), "{path}");
        }
    }
}
