//! Requests that web pages may make a browser send, and responses that they may read.

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use mla_router::{Config, RouterHandle};

use crate::support::{Client, FakeWorker, config, request, router};

const CHANGES: [(&str, &str); 8] = [
    ("POST", "/workers"),
    ("POST", "/add_worker"),
    ("POST", "/remove_worker"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("DELETE", "/workers/1"),
    ("POST", "/v1/completions"),
    ("POST", "/generate"),
];

/// The settings without flags.
fn default() -> Config {
    Config { allowed_hosts: Vec::new(), ..config() }
}

type Fields<'a> = &'a [(&'static str, &'a str)];

async fn ask(
    router: &RouterHandle,
    (method, path): (&str, &str),
    fields: Fields<'_>,
) -> (StatusCode, HeaderMap, String) {
    let mut request = request(method.parse::<Method>().expect("a method"), path, "");
    for (name, value) in fields {
        let value = HeaderValue::from_str(value).expect("a value");
        request.headers_mut().insert(HeaderName::from_static(name), value);
    }
    let mut client = Client::connect(router.local_addr()).await;
    let answer = client.call(request).await.expect("a whole response");
    let refused = answer.status == StatusCode::FORBIDDEN;
    let code = if refused { answer.error_code() } else { String::new() };
    (answer.status, answer.headers, code)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cross_site_requests_change_nothing() {
    let mut worker = FakeWorker::plain().await;
    let router = router(default(), &[&worker]).await;
    let foreign: [Fields<'_>; 6] = [
        &[("origin", "http://evil.example")],
        &[("origin", "http://evil.example"), ("content-type", "text/plain")],
        &[("origin", "null")],
        &[("origin", "http://localhost:1")],
        &[("sec-fetch-site", "cross-site")],
        &[("sec-fetch-site", "same-site")],
    ];
    for route in CHANGES {
        for fields in foreign {
            let (status, _, code) = ask(&router, route, fields).await;
            assert_eq!(
                (status, &*code),
                (StatusCode::FORBIDDEN, "origin_not_allowed"),
                "{route:?}"
            );
        }
    }
    assert_eq!(worker.requests_so_far(), 0);
    let own = format!("http://{}", router.local_addr());
    let host = router.local_addr().to_string();
    let own: [Fields<'_>; 3] = [
        &[],
        &[("origin", &own), ("host", &host), ("sec-fetch-site", "same-origin")],
        &[("sec-fetch-site", "none")],
    ];
    for fields in own {
        for route in CHANGES {
            let (status, ..) = ask(&router, route, fields).await;
            assert_ne!(status, StatusCode::FORBIDDEN, "{route:?} {fields:?}");
        }
    }
    // A link on another site may lead to the dashboard.
    let link: Fields<'_> = &[("sec-fetch-site", "cross-site")];
    for path in ["/dashboard", "/liveness", "/workers"] {
        assert_eq!(ask(&router, ("GET", path), link).await.0, StatusCode::OK, "{path}");
    }
}

/// DNS rebinding: the name of a site resolves to 127.0.0.1, so its pages have the origin of the router.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loopback_router_refuses_foreign_hosts() {
    let mut worker = FakeWorker::plain().await;
    let allowed = vec!["router.example".parse().expect("a name")];
    let router = router(Config { allowed_hosts: allowed, ..config() }, &[&worker]).await;
    let port = router.local_addr().port();
    for host in ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io"] {
        let host = format!("{host}:{port}");
        let fields: Fields<'_> = &[("host", &host), ("origin", &format!("http://{host}"))];
        for route in [&CHANGES[..], &[("GET", "/workers"), ("GET", "/v1/models")]].concat() {
            let (status, _, code) = ask(&router, route, fields).await;
            assert_eq!((status, &*code), (StatusCode::FORBIDDEN, "host_not_allowed"), "{route:?}");
        }
        assert_eq!(ask(&router, ("GET", "/liveness"), fields).await.0, StatusCode::OK);
    }
    assert_eq!(worker.requests_so_far(), 0);
    for host in ["localhost", "127.0.0.1:30000", "[::1]:30000", "Router.example:80"] {
        let answer = ask(&router, ("GET", "/workers"), &[("host", host)]).await;
        assert_eq!(answer.0, StatusCode::OK, "{host}");
    }
}

/// No page of another site has the key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn api_key_overrides_the_site_checks() {
    let worker = FakeWorker::plain().await;
    let config = Config { api_key: vec!["sesame".parse().expect("a key")], ..default() };
    let router = router(config, &[&worker]).await;
    let foreign = [("origin", "http://a.example"), ("host", "proxy.example")];
    let route = ("GET", "/workers");
    assert_eq!(ask(&router, route, &foreign).await.0, StatusCode::UNAUTHORIZED);
    let keyed = [&foreign[..], &[("authorization", "Bearer sesame")]].concat();
    assert_eq!(ask(&router, route, &keyed).await.0, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn allowed_origins_may_use_the_models() {
    let mut worker = FakeWorker::plain().await;
    let chat = "https://chat.example";
    let ours = |origins: &[&str], keys: &[&str]| Config {
        cors_allowed_origins: origins.iter().map(|text| text.parse().expect("one")).collect(),
        api_key: keys.iter().map(|key| key.parse().expect("a key")).collect(),
        ..default()
    };
    for (config, any) in [
        (ours(&[chat], &[]), false),
        (ours(&[chat], &["sesame"]), false),
        (ours(&["*"], &[]), true),
    ] {
        let router = router(config, &[&worker]).await;
        let asked: Fields<'_> = &[
            ("origin", chat),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ];
        let path = "/v1/chat/completions";
        // Without the key: browsers do not send it with a preflight.
        let (status, headers, _) = ask(&router, ("OPTIONS", path), asked).await;
        assert_eq!(status, StatusCode::NO_CONTENT);
        assert_eq!(headers["access-control-allow-origin"], chat);
        assert_eq!(headers["access-control-allow-methods"], "POST");
        assert_eq!(headers["access-control-allow-headers"], "authorization,content-type");
        let sent = [("origin", chat), ("authorization", "Bearer sesame")];
        let (status, headers, _) = ask(&router, ("POST", path), &sent).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(headers["access-control-allow-origin"], chat);
        assert_eq!(headers["vary"], "origin");
        let seen = worker.request().await;
        assert!(!seen.head.headers.contains_key("origin"), "the router has judged it");
        // The page can read an error as well.
        let (status, headers, _) = ask(&router, ("GET", path), &sent).await;
        assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(headers["access-control-allow-origin"], chat);

        let stranger = [("origin", "https://evil.example"), asked[1]];
        let (status, headers, _) = ask(&router, ("OPTIONS", path), &stranger).await;
        assert_eq!(status == StatusCode::NO_CONTENT, any);
        assert_eq!(headers.contains_key("access-control-allow-origin"), any);
        // Admin routes are closed to pages of all origins.
        let (status, headers, _) = ask(&router, ("OPTIONS", "/add_worker"), asked).await;
        assert_ne!(status, StatusCode::NO_CONTENT);
        assert!(!headers.contains_key("access-control-allow-origin"));
    }
    let router = router(ours(&["*"], &[]), &[&worker]).await;
    let flush = ask(&router, ("POST", "/flush_cache"), &[("origin", chat)]).await;
    assert_eq!(flush.0, StatusCode::FORBIDDEN);
}
