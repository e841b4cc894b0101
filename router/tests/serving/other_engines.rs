//! SGLang and vLLM as workers: their information, and token counts on request.

use bytes::Bytes;
use http::HeaderMap;
use mla_router::{RouterHandle, engine::Runtime};
use serde_json::{Value, json};

use crate::support::{Client, FakeWorker, Reply, Seen, Then, config, router};

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
