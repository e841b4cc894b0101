//! SGLang and vLLM as workers: their information, and token counts on request.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::HeaderMap;
use mla_router::{Config, RouterHandle, engine::Runtime};
use serde_json::{Value, json};
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep},
};

use crate::support::{Client, FakeWorker, Reply, Seen, Then, config, router, secs, soon};

const METRICS: &str = r#"# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_cpu_blocks="None",num_gpu_blocks="2048"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"#;
const CHAT: &str = r#"{"messages":[{"role":"user","content":"hello"}],"stream":true}"#;
const CHUNK: &str = r#"{"id":"x","choices":[{"index":0,"delta":{"content":"a"}}]}"#;
const USAGE: &str = r#"{"id":"x","choices":[],"usage":{"prompt_tokens":31,"total_tokens":32,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":16}}}"#;

fn event(data: &str) -> Bytes {
    Bytes::from(format!("data: {data}\n\n"))
}

/// A stream of vLLM or SGLang: the counts come in a separate event on request.
fn answer(seen: &Seen) -> Reply {
    let body: Value = serde_json::from_slice(&seen.body).expect("JSON");
    let mut events = vec![event(CHUNK)];
    if body["stream_options"]["include_usage"] == json!(true) {
        events.push(event(USAGE));
    }
    events.push(event("[DONE]"));
    Reply::Stream(HeaderMap::new(), events, Then::End)
}

async fn vllm() -> FakeWorker {
    let worker = FakeWorker::start(answer).await;
    worker.set_metrics(METRICS);
    worker
}

/// The client's bytes of such a chat.
async fn ask(router: &RouterHandle, path: &str, body: &str) -> Bytes {
    Client::connect(router.local_addr()).await.post(path, body.to_owned()).await.body
}

/// Prompt tokens with a report, and cached tokens among them.
fn told(router: &RouterHandle) -> (u64, u64) {
    let counters = &router.router().registry.replicas()[0].counters;
    (counters.prompt_tokens.total(), counters.cached_tokens.total())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vllm_cache_size_is_read_from_its_metrics() {
    let worker = vllm().await;
    let router = router(config(), &[&worker]).await;
    let view = &router.workers()[0];
    assert_eq!(view.runtime, Some(Runtime::Vllm));
    assert_eq!(view.max_total_num_tokens, Some(2048 * 16));
    let learned = &router.router().registry.replicas()[0].learned;
    assert_eq!(learned.capacity(), 2048, "blocks of 16 tokens");
}

/// The paused clock advances to the next timer when all tasks are idle.
#[tokio::test(start_paused = true)]
async fn figures_return_soon_after_one_failed_read() {
    let worker = FakeWorker::plain().await;
    let page = "sglang:num_running_reqs 3\n";
    worker.set_metrics(page);
    let config = Config { health_check_interval_secs: secs(1.0), ..config() };
    let router = router(config, &[&worker]).await;
    let running = || router.router().registry.replicas()[0].engine_load().running;
    let until = async |expected: Option<f64>| {
        let begun = Instant::now();
        while running() != expected {
            sleep(Duration::from_millis(100)).await;
        }
        begun.elapsed()
    };
    until(Some(3.0)).await;
    worker.set_metrics("");
    until(None).await;
    worker.set_metrics(page);
    let took = until(Some(3.0)).await;
    assert!(took < Duration::from_secs(4), "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_is_requested_from_other_engines_and_removed_for_the_client() {
    let mut worker = vllm().await;
    let router = router(config(), &[&worker]).await;
    let seen = ask(&router, "/v1/chat/completions", CHAT).await;
    assert_eq!(seen, [event(CHUNK), event("[DONE]")].concat());
    let sent: Value = serde_json::from_slice(&worker.request().await.body).expect("JSON");
    let mut asked: Value = serde_json::from_str(CHAT).expect("JSON");
    asked["stream_options"] = json!({"include_usage": true});
    assert_eq!(sent, asked);
    assert_eq!(told(&router), (31, 16));
    assert_eq!(router.workers()[0].unreported_answers, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_requested_by_the_client_is_forwarded() {
    let mut worker = vllm().await;
    let router = router(config(), &[&worker]).await;
    let with =
        |options: &str| CHAT.replace("true}", &format!("true,\"stream_options\":{options}}}"));
    for (options, events) in [
        (r#"{"include_usage":true}"#, vec![event(CHUNK), event(USAGE), event("[DONE]")]),
        (r#"{"include_usage":false}"#, vec![event(CHUNK), event("[DONE]")]),
        ("null", vec![event(CHUNK), event("[DONE]")]),
    ] {
        let body = with(options);
        assert_eq!(ask(&router, "/v1/chat/completions", &body).await, events.concat());
        assert_eq!(worker.request().await.body, body);
    }
    assert_eq!(told(&router), (31, 16));
    assert_eq!(router.workers()[0].unreported_answers, 2, "nobody has learned from these");
    let page = ask_metrics(&router).await;
    let line = format!("mla_router_unreported_answers_total{{worker=\"{}\"}} 2", worker.url());
    assert!(page.contains(&line), "{page}");
}

async fn ask_metrics(router: &RouterHandle) -> String {
    let page = Client::connect(router.local_addr()).await.get("/metrics").await.body;
    String::from_utf8(page.to_vec()).expect("text")
}

/// This project's workers report in the response head; unknown engines may not support the field.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_to_own_and_unknown_engines_are_unchanged() {
    for (info, runtime) in
        [(Some(r#"{"boot_id":"a","max_total_num_tokens":4096}"#), Some(Runtime::Mla)), (None, None)]
    {
        let mut worker = FakeWorker::start(answer).await;
        if let Some(info) = info {
            worker.set_info(info);
        }
        let router = router(config(), &[&worker]).await;
        assert_eq!(router.workers()[0].runtime, runtime);
        ask(&router, "/v1/chat/completions", CHAT).await;
        assert_eq!(worker.request().await.body, CHAT);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_is_requested_only_for_openai_streams() {
    let mut worker = FakeWorker::start(answer).await;
    worker.set_info(r#"{"max_total_num_tokens":4096,"internal_states":[]}"#);
    let router = router(config(), &[&worker]).await;
    assert_eq!(router.workers()[0].runtime, Some(Runtime::Sglang));
    for (path, body, is_asked) in [
        ("/v1/completions", r#"{"prompt":"a","stream":true}"#, true),
        ("/v1/completions", r#"{"prompt":"a"}"#, false),
        ("/generate", r#"{"text":"a","stream":true}"#, false),
    ] {
        ask(&router, path, body).await;
        let sent = worker.request().await.body;
        assert_eq!(sent != body, is_asked, "{path} {sent:?}");
    }
}

const TWO_RANKS: &str = r#"{"max_total_num_tokens":4096,"dp_size":2}"#;

/// A router that chooses among the ranks of `worker`, which reports two of them.
async fn with_ranks(worker: &FakeWorker) -> RouterHandle {
    worker.set_info(TWO_RANKS);
    router(Config { dp_aware: true, ..config() }, &[worker]).await
}

fn ranks(router: &RouterHandle) -> Vec<Option<u32>> {
    router.workers().iter().map(|worker| worker.dp_rank).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_data_parallel_rank_of_sglang_has_its_own_load_and_cache() {
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let mut worker = FakeWorker::start(move |_| Reply::When(Arc::clone(&held))).await;
    let router = with_ranks(&worker).await;
    assert_eq!(ranks(&router), [Some(0), Some(1)]);
    let address = router.local_addr();
    let ask = |letter: &str| {
        let body = json!({"prompt": letter.repeat(10_000)}).to_string();
        tokio::spawn(async move {
            Client::connect(address).await.post("/v1/completions", body).await.status
        })
    };
    let (mut asked, mut seen) = (Vec::new(), Vec::new());
    for letter in ["a", "b"] {
        asked.push(ask(letter));
        seen.push(worker.request().await.head.headers["x-data-parallel-rank"].clone());
    }
    seen.sort_unstable();
    assert_eq!(seen, ["0", "1"], "the second rank has less to do");
    gate.add_permits(100);
    for answer in asked {
        assert_eq!(answer.await.expect("an answer"), 200);
    }
    let told = Client::connect(address).await.get("/metrics").await;
    let told = String::from_utf8(told.body.to_vec()).expect("text");
    for rank in 0..2 {
        let series = format!(r#"mla_router_selections_total{{worker="{}@{rank}""#, worker.url());
        assert!(told.contains(&series), "{series} is not in {told}");
    }
    worker.kill().await;
    worker.set_info(r#"{"max_total_num_tokens":4096,"dp_size":1}"#);
    worker.restart().await;
    soon(router.router().registry.wait_until(|replicas| replicas.len() == 1)).await;
    assert_eq!(ranks(&router), [None]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_request_is_not_sent_to_another_rank_of_the_same_process() {
    let mut worker = FakeWorker::start(|_| Reply::status(500)).await;
    let router = with_ranks(&worker).await;
    let mut client = Client::connect(router.local_addr()).await;
    assert_eq!(client.post("/v1/completions", r#"{"prompt":"a"}"#).await.status, 500);
    assert_eq!(worker.requests_so_far(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rank_is_left_to_the_engine_by_default() {
    let mut worker = FakeWorker::plain().await;
    worker.set_info(TWO_RANKS);
    let router = router(config(), &[&worker]).await;
    assert_eq!(ranks(&router), [None]);
    ask(&router, "/v1/completions", r#"{"prompt":"a"}"#).await;
    assert!(!worker.request().await.head.headers.contains_key("x-data-parallel-rank"));
}
