//! The session of a request.

use http::{HeaderValue, StatusCode};
use mla_router::{Config, config::PolicyName};

use crate::support::{Client, FakeWorker, config, post, router};

/// Returns how many of `requests` each of two workers gets by the hash of the session.
async fn shared(requests: impl Iterator<Item = (Option<String>, String)>) -> [usize; 2] {
    let mut workers = [FakeWorker::plain().await, FakeWorker::plain().await];
    let config = Config { policy: PolicyName::ConsistentHash, ..config() };
    let router = router(config, &[&workers[0], &workers[1]]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for (header, body) in requests {
        let mut sent = post("/v1/completions", body);
        if let Some(name) = header {
            let name = HeaderValue::from_str(&name).expect("a header value");
            sent.headers_mut().insert("x-mla-session", name);
        }
        let answer = client.call(sent).await.expect("a whole response");
        assert_eq!(answer.status, StatusCode::OK);
    }
    workers.each_mut().map(FakeWorker::requests_so_far)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_without_session_has_no_session() {
    let body = |number| format!(r#"{{"prompt":"{number}","user":""}}"#);
    for header in [None, Some(String::new())] {
        let share = shared((0..40).map(|number| (header.clone(), body(number)))).await;
        assert!(share.iter().all(|share| *share > 0), "{header:?}: {share:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_in_header_and_body_are_equal() {
    for number in 0..10 {
        let in_head = (Some(format!("ann {number}")), r#"{"prompt":"a"}"#.to_owned());
        let in_body = (None, format!(r#"{{"prompt":"b","user":"\u0061nn {number}"}}"#));
        let mut share = shared([in_head, in_body].into_iter()).await;
        share.sort_unstable();
        assert_eq!(share, [0, 2], "{number}");
    }
}
