//! A failure of a worker before its first byte is hidden from the client; a later one is not.

use bytes::Bytes;
use http::StatusCode;
use http_body_util::BodyExt;
use mla_router::{Config, config::PolicyName, fleet::Phase};
use tokio::sync::mpsc;

use crate::support::{
    Client, FakeWorker, GOOD, Reply, all_in, assert_nothing_reserved, config, post, router, secs,
};

const PATH: &str = "/v1/chat/completions";
const BODY: &str = r#"{"messages":[{"role":"user","content":"hello"}]}"#;
const STREAM: &str = r#"{"messages":[{"role":"user","content":"hello"}],"stream":true}"#;

/// Round robin, so that the choice is known, and rare health checks, so that they do not interfere.
fn in_turn() -> Config {
    Config { policy: PolicyName::RoundRobin, health_check_interval_secs: secs(3600.0), ..config() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_worker_is_skipped_and_marked_unhealthy() {
    let mut dead = FakeWorker::plain().await;
    let mut alive = FakeWorker::start(|_| Reply::good()).await;
    let router = router(in_turn(), &[&dead, &alive]).await;
    dead.kill().await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..4 {
        let answer = client.post(PATH, BODY).await;
        assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, GOOD.as_bytes()));
    }
    assert_eq!(alive.requests_so_far(), 4);
    let phases: Vec<Phase> = router.workers().iter().map(|worker| worker.phase).collect();
    assert_eq!(phases, [Phase::Suspect, Phase::Healthy]);
    let metrics = mla_router::admin::metrics::render(router.router());
    assert!(metrics.contains("mla_router_retries_total{cause=\"connect\"} 1"), "{metrics}");
    assert!(metrics.contains("mla_router_upstream_errors_total{kind=\"connect\"} 1"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_closed_without_a_response_is_retried_elsewhere() {
    let mut closing = FakeWorker::start(|_| Reply::Close).await;
    let mut good = FakeWorker::plain().await;
    let router = router(in_turn(), &[&closing, &good]).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(closing.request().await.body, good.request().await.body);
    // The failure triggers a health check, although the next one is due in an hour.
    all_in(Phase::Healthy, &router).await;
    assert_eq!(closing.checks(), (0, 2));
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_or_busy_worker_is_skipped_and_stays_healthy() {
    for status in [500, 502, 503, 504] {
        let mut busy = FakeWorker::start(move |_| Reply::status(status)).await;
        let mut good = FakeWorker::plain().await;
        let router = router(in_turn(), &[&busy, &good]).await;
        let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!((busy.requests_so_far(), good.requests_so_far()), (1, 1));
        all_in(Phase::Healthy, &router).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn final_statuses_are_not_retried() {
    for status in [400, 404, 413, 422, 501] {
        let mut first = FakeWorker::start(move |_| Reply::status(status)).await;
        let mut other = FakeWorker::plain().await;
        let router = router(in_turn(), &[&first, &other]).await;
        let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
        assert_eq!(answer.status.as_u16(), status);
        assert_eq!(&answer.body[..], b"{\"from\":\"worker\"}");
        assert_eq!((first.requests_so_far(), other.requests_so_far()), (1, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn break_after_the_first_byte_is_not_retried() {
    let (frames, source) = mpsc::unbounded_channel();
    let source = parking_lot::Mutex::new(Some(source));
    let mut breaking =
        FakeWorker::start(move |_| Reply::Frames(source.lock().take().expect("one request"))).await;
    let mut other = FakeWorker::plain().await;
    let router = router(in_turn(), &[&breaking, &other]).await;
    let mut client = Client::connect(router.local_addr()).await;
    frames.send(Bytes::from_static(b"data: {\"choices\":[1]}\n\n")).expect("streaming");
    let mut response = client.send(post(PATH, STREAM)).await.expect("a head");
    response.frame().await.expect("not over").expect("not broken");
    breaking.kill().await;
    let ended = response.frame().await;
    assert!(matches!(ended, Some(Err(_))), "the stream ended as if it were whole: {ended:?}");
    assert_eq!(other.requests_so_far(), 0);
    assert_nothing_reserved(&router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retry_after_is_sent_if_all_workers_fail() {
    let closing = FakeWorker::start(|_| Reply::Close).await;
    let mut dead = FakeWorker::plain().await;
    let config = Config { max_retries: 1, ..in_turn() };
    let router = router(config, &[&closing, &dead]).await;
    dead.kill().await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
    assert_eq!(answer.status, StatusCode::BAD_GATEWAY);
    assert_eq!(answer.error_code(), "workers_failed");
    assert_eq!(answer.headers["retry-after"], "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn last_error_response_is_forwarded_if_all_workers_fail() {
    let mut workers = [
        FakeWorker::start(|_| Reply::status(500)).await,
        FakeWorker::start(|_| Reply::status(502)).await,
    ];
    let router = router(in_turn(), &[&workers[0], &workers[1]]).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
    assert_eq!(answer.status, StatusCode::BAD_GATEWAY);
    assert_eq!(&answer.body[..], b"{\"from\":\"worker\"}");
    assert_eq!(answer.headers["retry-after"], "1");
    for worker in &mut workers {
        assert_eq!(worker.requests_so_far(), 1, "each is asked once, whatever retries are left");
    }
    assert_nothing_reserved(&router).await;
}

/// The process of a worker may have died with the connection, and the request may be the cause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_request_is_sent_to_at_most_two_workers() {
    let poison = |seen: &crate::support::Seen| match &seen.body[..] {
        body if body == STREAM.as_bytes() => Reply::Close,
        _ => Reply::good(),
    };
    let mut workers = Vec::new();
    for _ in 0..4 {
        workers.push(FakeWorker::start(poison).await);
    }
    let router = router(in_turn(), &workers.iter().collect::<Vec<_>>()).await;
    let mut client = Client::connect(router.local_addr()).await;
    let answer = client.post(PATH, STREAM).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(answer.error_code(), "request_kills_workers");
    assert_eq!(answer.headers["x-should-retry"], "false");
    let asked: Vec<usize> = workers.iter_mut().map(FakeWorker::requests_so_far).collect();
    assert_eq!(asked.iter().sum::<usize>(), 2, "{asked:?}");
    assert_eq!(
        client.post(PATH, BODY).await.status,
        StatusCode::OK,
        "only that request is refused"
    );
    assert_nothing_reserved(&router).await;
}

#[tokio::test(start_paused = true)]
async fn retry_budget_limits_retries_to_a_failing_fleet() {
    let mut workers = [
        FakeWorker::start(|_| Reply::status(500)).await,
        FakeWorker::start(|_| Reply::status(500)).await,
    ];
    let config = Config { retry_budget: "0.2".parse().expect("a share"), ..in_turn() };
    let router = router(config, &[&workers[0], &workers[1]]).await;
    let mut client = Client::connect(router.local_addr()).await;
    for _ in 0..300 {
        assert_eq!(client.post(PATH, BODY).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    }
    let asked: usize = workers.iter_mut().map(FakeWorker::requests_so_far).sum();
    // 20% of 300, and 10 a second in a window of ten; of the next window as well if this took long.
    assert!((400..=560).contains(&asked), "{asked} requests for 300");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn max_retries_bounds_the_attempts() {
    let mut workers = Vec::new();
    for _ in 0..4 {
        workers.push(FakeWorker::start(|_| Reply::status(500)).await);
    }
    let config = Config { max_retries: 1, ..in_turn() };
    let router = router(config, &workers.iter().collect::<Vec<_>>()).await;
    let answer = Client::connect(router.local_addr()).await.post(PATH, BODY).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    let asked: Vec<usize> = workers.iter_mut().map(FakeWorker::requests_so_far).collect();
    assert_eq!(asked.iter().sum::<usize>(), 2, "{asked:?}");
    assert!(asked.iter().all(|count| *count <= 1), "one worker was asked twice: {asked:?}");
}
