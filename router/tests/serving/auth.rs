//! Authorization: every route without a key, with a client key, and with the admin key.

use std::net::SocketAddr;

use http::{HeaderValue, Method, StatusCode};
use http_body_util::BodyExt;
use mla_router::{Config, admin::dashboard::FILES, fleet::Phase};
use serde_json::json;

use crate::support::{Client, FakeWorker, Raw, all_in, config, request, router};

const PROBES: [&str; 5] = ["/", "/health", "/health_generate", "/liveness", "/readiness"];
const DATA: [(&str, &str); 9] = [
    ("POST", "/generate"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/m"),
    ("GET", "/get_model_info"),
    ("GET", "/openapi.json"),
];

/// Every route and method that the source registers, so that new ones are tested as well.
fn own_routes() -> Vec<(&'static str, &'static str)> {
    let source = include_str!("../../src/admin/mod.rs");
    let routes = source.split(".route(").skip(1).flat_map(|route| {
        let (path, handlers) = route.split_once("\",").expect("a path");
        let path = path.trim().trim_start_matches('"');
        let handlers = handlers.split("\n        .").next().unwrap_or_default();
        let methods = [("GET", "get("), ("POST", "post("), ("DELETE", "delete(")];
        let taken = methods.into_iter().filter(move |(_, call)| handlers.contains(call));
        taken.map(move |(method, _)| {
            (method, if path == "/workers/{id}" { "/workers/1" } else { path })
        })
    });
    // Clients may read it with their key.
    let routes = routes.filter(|(_, path)| *path != "/openapi.json");
    let pages = FILES.iter().map(|file| ("GET", file.path));
    let routes: Vec<_> = routes.chain(pages).collect();
    assert!(routes.len() > 10 && routes.contains(&("DELETE", "/workers")), "{routes:?}");
    assert!(routes.iter().all(|(_, path)| path.starts_with('/') && !path.contains('{')));
    routes
}

fn is_open(route: &str) -> bool {
    PROBES.contains(&route) || FILES.iter().any(|file| file.path == route)
}

fn with_keys() -> Config {
    Config {
        api_key: ["sesame", "open-up"].map(|key| key.parse().expect("a key")).into(),
        admin_api_key: Some("caliph".parse().expect("a key")),
        ..config()
    }
}

async fn status(address: SocketAddr, (method, path): (&str, &str), key: Option<&str>) -> u16 {
    let method = Method::from_bytes(method.as_bytes()).expect("a method");
    let mut request = request(method, path, "");
    if let Some(key) = key {
        let value = HeaderValue::from_str(&format!("Bearer {key}")).expect("a value");
        request.headers_mut().insert("authorization", value);
    }
    // Only the head: the event stream has no end.
    let mut client = Client::connect(address).await;
    let (answer, body) = client.send(request).await.expect("a head").into_parts();
    if answer.status == StatusCode::UNAUTHORIZED {
        let body = body.collect().await.expect("a whole body").to_bytes();
        assert!(body.windows(15).any(|part| part == b"invalid_api_key"), "{body:?}");
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
    }
    answer.status.as_u16()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_need_a_key_and_admin_routes_the_admin_key() {
    let mut worker = FakeWorker::plain().await;
    let router = router(with_keys(), &[&worker]).await;
    let address = router.local_addr();
    for route in own_routes() {
        for key in [None, Some("sesame"), Some("open-up"), Some("caliphs"), Some("calip")] {
            let status = status(address, route, key).await;
            assert_eq!(status != 401, is_open(route.1), "{route:?} with {key:?}: {status}");
        }
        assert_ne!(status(address, route, Some("caliph")).await, 401, "{route:?}");
    }
    worker.requests_so_far();
    for route in DATA {
        for key in [None, Some("sesam"), Some("sesamee"), Some("")] {
            assert_eq!(status(address, route, key).await, 401, "{route:?} with {key:?}");
        }
        assert_eq!(worker.requests_so_far(), 0, "{route:?}");
        for key in ["sesame", "open-up", "caliph"] {
            assert_eq!(status(address, route, Some(key)).await, 200, "{route:?} with {key:?}");
            assert_eq!(worker.request().await.head.headers["authorization"], "Bearer sesame");
        }
    }
    for route in [("GET", "/nothing"), ("GET", "/generate"), ("PUT", "/v1/x"), ("GET", "//")] {
        assert_eq!(status(address, route, None).await, 401, "{route:?}");
    }
}

/// Any spelling of a path has exactly the rights of the route that answers it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_path_spelling_bypasses_the_key() {
    let mut worker = FakeWorker::plain().await;
    let router = router(with_keys(), &[&worker]).await;
    for path in [
        "//v1/models",
        "/./v1/models",
        "/%2e/v1/models",
        "/v1/..;/models",
        "/v1/../health",
        "/v1/%2e%2e/health",
        "/v1//../health",
        "/health/../workers",
        "/health/..;/workers",
        "/health%2f..%2fworkers",
        "/health;/../workers",
        "/dashboard/../metrics",
        "/dashboard/",
        "/health/",
        "/%68ealth",
        "/HEALTH",
        "/workers/",
        "/workers?url=/health",
        "/workers;/health",
        "//health",
        "/health//",
        "http://x/workers",
        "http://x/v1/models",
    ] {
        let message = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        let answer = Raw::send(router.local_addr(), message.as_bytes()).await.read_to_close().await;
        assert!(answer.starts_with("HTTP/1.1 401"), "{path}: {answer}");
    }
    assert_eq!(worker.requests_so_far(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_key_opens_all_routes_without_an_admin_key() {
    let worker = FakeWorker::plain().await;
    let router = router(Config { admin_api_key: None, ..with_keys() }, &[&worker]).await;
    let address = router.local_addr();
    for route in own_routes().into_iter().chain(DATA) {
        let open = is_open(route.1);
        assert_eq!(status(address, route, None).await == 401, !open, "{route:?}");
        assert_ne!(status(address, route, Some("open-up")).await, 401, "{route:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_key_is_forwarded_only_if_the_router_has_none() {
    let mut worker = FakeWorker::plain().await;
    let key = |text: &str| text.parse().expect("a key");
    for (config, sent, arrives) in [
        (config(), "theirs", Some("Bearer theirs")),
        (Config { worker_api_key: Some(key("w")), ..config() }, "theirs", Some("Bearer w")),
        (Config { worker_api_key: Some(key("w")), ..with_keys() }, "sesame", Some("Bearer w")),
        (Config { admin_api_key: Some(key("a")), ..config() }, "theirs", None),
    ] {
        let router = router(config, &[&worker]).await;
        let address = router.local_addr();
        assert_eq!(status(address, ("POST", "/generate"), Some(sent)).await, 200);
        let seen = worker.request().await;
        let authorization = seen.head.headers.get("authorization");
        assert_eq!(authorization.map(HeaderValue::as_bytes), arrives.map(str::as_bytes));
    }
}

/// Anthropic's clients put their key into another field.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_in_x_api_key_opens_as_much_and_goes_as_far() {
    let mut worker = FakeWorker::plain().await;
    let open = Config { worker_api_key: Some("w".parse().expect("a key")), ..config() };
    for (config, sent, status, arrives) in [
        (with_keys(), "sesame", 200, false),
        (with_keys(), "sesam", 401, false),
        (with_keys(), "Bearer sesame", 401, false),
        (config(), "theirs", 200, true),
        (open, "theirs", 200, false),
    ] {
        let router = router(config, &[&worker]).await;
        let mut request = request(Method::POST, "/v1/messages", "{}");
        request.headers_mut().insert("x-api-key", HeaderValue::from_static(sent));
        let mut client = Client::connect(router.local_addr()).await;
        let answer = client.send(request).await.expect("a head");
        assert_eq!(answer.status(), status, "{sent}");
        if status == 200 {
            let seen = worker.request().await;
            assert_eq!(seen.head.headers.contains_key("x-api-key"), arrives, "{sent}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_admin_paths_get_the_worker_admin_key() {
    let mut worker = FakeWorker::plain().await;
    let key = |text: &str| Some(text.parse().expect("a key"));
    for (admin, sent) in [(key("a"), "Bearer a"), (None, "Bearer w")] {
        let config = Config { worker_api_key: key("w"), worker_admin_api_key: admin, ..config() };
        let router = router(config, &[&worker]).await;
        let address = router.local_addr();
        assert_eq!(status(address, ("POST", "/flush_cache"), None).await, 200);
        assert_eq!(worker.request().await.head.headers["authorization"], sent);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_may_have_a_key_of_its_own() {
    for path in ["/workers", "/add_worker"] {
        let mut worker = FakeWorker::plain().await;
        let shared = Some("w".parse().expect("a key"));
        let router = router(Config { worker_api_key: shared, ..config() }, &[]).await;
        let mut client = Client::connect(router.local_addr()).await;
        let url = worker.url();
        let mut statuses = Vec::new();
        for key in ["", "own"] {
            let answer = match path {
                "/workers" => {
                    client.post(path, json!({"url": url, "api_key": key}).to_string()).await
                }
                _ => client.post(&format!("{path}?url={url}&api_key={key}"), "").await,
            };
            if key.is_empty() {
                assert_eq!(answer.json()["error"]["param"], "api_key");
            }
            statuses.push(answer.status.is_success());
        }
        assert_eq!(statuses, [false, true], "{path}");
        all_in(Phase::Healthy, &router).await;
        assert_eq!(client.post("/generate", "{}").await.status, 200);
        assert_eq!(worker.request().await.head.headers["authorization"], "Bearer own");
    }
}
