//! The HTTP contract: paths, and heads of responses.

use std::{io, sync::Arc, time::SystemTime};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::{
    answer::Answers,
    body::{End, Events, MockBody, engine_died},
    engine::{self, Event, Finish, Stats, Totals},
    fault::{Fault, Garbage, Kind},
    query::{Endpoint, Query},
    settings::{Flavour, Settings},
    socket::Spoil,
    state::{Order, State},
    tokens::Answer,
};

const REPLAY: &str = "x-mla-replay";
const HTML: &str = "<html><body><h1>It works!</h1></body></html>";

pub type MockResponse = Response<MockBody>;

/// Answers one request. An error closes the connection.
pub async fn answer(
    state: Arc<State>,
    spoil: Spoil,
    request: Request<Incoming>,
) -> io::Result<MockResponse> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let endpoint = match (head.method.as_str(), head.uri.path()) {
        ("POST", "/v1/chat/completions") => Endpoint::Chat,
        ("POST", "/v1/completions") => Endpoint::Completions,
        ("POST", "/generate") if state.settings.flavour != Flavour::Vllm => Endpoint::Generate,
        (_, "/health_generate") if state.fault.silences_engine() => std::future::pending().await,
        (_, path) => return Ok(side_path(&state, path, &body)),
    };
    let fault = state.fault.for_request();
    match fault {
        Kind::Hang => std::future::pending().await,
        Kind::Status { status } => return Ok(told(status)),
        _ => {}
    }
    let query = match Query::read(endpoint, &body, state.settings.flavour) {
        Ok(query) => query,
        Err(error) => return Ok(refusal(StatusCode::BAD_REQUEST, &error.to_string())),
    };
    match fault {
        Kind::Garbage { form } => Ok(garbage(form, query.stream)),
        _ => Generating { state, spoil, fault }.answer(&query, &head.headers).await,
    }
}

/// Answers requests that do not generate tokens.
fn side_path(state: &State, path: &str, body: &Bytes) -> MockResponse {
    #[derive(Deserialize)]
    struct Abort {
        rid: String,
    }
    let settings = &state.settings;
    let is_vllm = settings.flavour == Flavour::Vllm;
    match path {
        "/health" if settings.flavour == Flavour::Mla && state.fault.stops_engine() => {
            json_response(StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"stuck"}"#)
        }
        "/health_generate" if is_vllm => refusal(StatusCode::NOT_FOUND, "no such path"),
        "/health" | "/health_generate" | "/ping" => ok("{}"),
        "/v1/models" => {
            let model = json!({"id": settings.model, "object": "model", "owned_by": "mock"});
            ok(json!({"object": "list", "data": [model]}).to_string())
        }
        "/get_model_info" | "/model_info" if !is_vllm => ok(json!({
            "model_path": settings.model, "tokenizer_path": settings.model, "is_generation": true,
        })
        .to_string()),
        "/get_server_info" | "/server_info" if !is_vllm => ok(server_info(state).to_string()),
        "/flush_cache" => {
            state.flush();
            ok(r#"{"success":true}"#)
        }
        "/abort_request" => match serde_json::from_slice::<Abort>(body) {
            Ok(abort) => ok(json!({"aborted": u32::from(state.abort(&abort.rid))}).to_string()),
            Err(error) => refusal(StatusCode::BAD_REQUEST, &error.to_string()),
        },
        "/metrics" => ok(metrics_page(settings, &state.stats())),
        "/mock/stats" => ok(json!(state.stats()).to_string()),
        "/mock/fault" => match serde_json::from_slice::<Fault>(body) {
            Ok(fault) => {
                state.set_fault(fault);
                ok("{}")
            }
            Err(error) => refusal(StatusCode::BAD_REQUEST, &error.to_string()),
        },
        _ => refusal(StatusCode::NOT_FOUND, "no such path"),
    }
}

fn server_info(state: &State) -> Value {
    let settings = &state.settings;
    let mut info = json!({
        "model_path": settings.model,
        "served_model_name": settings.model,
        "max_total_num_tokens": settings.kv_tokens / settings.page_size * settings.page_size,
        "page_size": settings.page_size,
        "max_running_requests": settings.max_running_requests,
        "internal_states": [state.stats()],
    });
    if settings.flavour == Flavour::Mla {
        info["boot_id"] = state.boot_id().into();
        info["in_batch_prefix_sharing"] = settings.in_batch_sharing.into();
        info["attn_dp_size"] = state.group_size().into();
    }
    info
}

fn metrics_page(settings: &Settings, now: &Stats) -> String {
    let Totals { prompt_tokens, cached_tokens, completion_tokens, .. } = now.totals;
    let mut page = String::new();
    if settings.flavour == Flavour::Vllm {
        // vLLM reports the size of its KV cache only here.
        let (size, pages) = (settings.page_size, settings.kv_tokens / settings.page_size);
        page = format!(
            "vllm:cache_config_info{{block_size=\"{size}\",num_gpu_blocks=\"{pages}\"}} 1.0\n\
             vllm:prompt_tokens_total {prompt_tokens}\nvllm:generation_tokens_total {completion_tokens}\n",
        );
    }
    page + &format!(
        "mock_requests_running {}\nmock_requests_waiting {}\nmock_prompt_tokens_total {prompt_tokens}\n\
         mock_cached_tokens_total {cached_tokens}\nmock_completion_tokens_total {completion_tokens}\n",
        now.running, now.waiting,
    )
}

/// Answers a request that generates tokens.
struct Generating {
    state: Arc<State>,
    spoil: Spoil,
    fault: Kind,
}

impl Generating {
    async fn answer(self, query: &Query, headers: &HeaderMap) -> io::Result<MockResponse> {
        let Some(mut answers) = begin(query) else {
            return Ok(refusal(StatusCode::BAD_REQUEST, "continuation: not one of ours"));
        };
        let is_ours = self.state.settings.flavour == Flavour::Mla;
        answers.replay = is_ours && query.stream && headers.contains_key(REPLAY);
        let (sender, mut events) = unbounded_channel();
        if let Some(refused) = self.submit(query, &answers, &sender) {
            return Ok(refused);
        }
        drop(sender);
        if query.stream {
            return Ok(self.stream(answers, events).await);
        }
        while let Some(event) = events.recv().await {
            answers.add(event);
        }
        self.whole(&answers)
    }

    /// Submits the choices that are not complete. Returns the refusal if one of them is refused.
    fn submit(
        &self,
        query: &Query,
        answers: &Answers,
        sender: &UnboundedSender<Event>,
    ) -> Option<MockResponse> {
        let state = &self.state;
        for (index, prompt) in query.prompts.iter().enumerate() {
            let choice = &answers.choices[index];
            if choice.finish.is_some() {
                continue;
            }
            let answer = Answer::to(prompt, query.seed);
            let until = query.max_tokens.unwrap_or_else(|| answer.length());
            if !state.fits(prompt.len() + until) {
                return Some(refusal(StatusCode::BAD_REQUEST, "longer than the context"));
            }
            let from = choice.tokens.len();
            if from >= until {
                return Some(refusal(StatusCode::BAD_REQUEST, "continuation: at its end already"));
            }
            let request = engine::Request {
                name: query.name.clone().unwrap_or_else(|| answers.id.clone()),
                index,
                tokens: [prompt.as_slice(), &choice.tokens].concat(),
                root: query.root,
                answer,
                from,
                until,
                finish: if query.max_tokens.is_some() { Finish::Length } else { Finish::Stop },
                events: sender.clone(),
            };
            if state.submit(request).is_err() {
                return Some(told(429));
            }
        }
        None
    }

    async fn stream(
        self,
        mut answers: Answers,
        mut events: UnboundedReceiver<Event>,
    ) -> MockResponse {
        let state = &self.state;
        let is_ours = state.settings.flavour == Flavour::Mla;
        // This project's workers send the head, with the counts, at the first token. Other engines send it at once.
        let first = if is_ours { events.recv().await } else { None };
        let mut response = Response::new(());
        put(response.headers_mut(), "content-type", "text/event-stream; charset=utf-8");
        put(response.headers_mut(), "cache-control", "no-cache");
        if is_ours {
            let cached = first.map_or(0, |event| event.cached).min(answers.prompt_tokens());
            count(response.headers_mut(), &answers, cached);
            report_load(response.headers_mut(), state);
        }
        if answers.replay {
            for choice in answers.choices.iter_mut().take(1).filter(|choice| choice.sent == 0) {
                choice.cached = first.map_or(0, |event| event.cached);
            }
            put(response.headers_mut(), REPLAY, &answers.opaque());
        }
        let mut body = Events::new(self.state, answers, events, self.fault, self.spoil);
        body.first = first;
        response.map(|()| MockBody::Events(Box::new(body)))
    }

    fn whole(self, answers: &Answers) -> io::Result<MockResponse> {
        if answers.choices.iter().any(|choice| choice.finish.is_none()) {
            return Err(io::Error::other("the engine has restarted"));
        }
        let text = answers.whole();
        let body = match self.fault {
            Kind::Break { .. } => MockBody::half(text, End::Broken),
            Kind::Freeze { .. } => MockBody::half(text, End::Never),
            Kind::BadChunking { .. } => MockBody::spoiled(text, self.spoil),
            Kind::Die { .. } => {
                self.state.order(Order::Die);
                return Err(io::Error::other("told to die"));
            }
            Kind::EngineDied { .. } => {
                return Ok(json_response(StatusCode::INTERNAL_SERVER_ERROR, engine_died()));
            }
            _ => MockBody::whole(text),
        };
        let mut response = Response::new(body);
        put(response.headers_mut(), "content-type", "application/json");
        if self.state.settings.flavour == Flavour::Mla {
            count(response.headers_mut(), answers, answers.cached_tokens());
            report_load(response.headers_mut(), &self.state);
        }
        Ok(response)
    }
}

/// Builds the answer that continues another worker's. `None` if its opaque value is invalid.
fn begin(query: &Query) -> Option<Answers> {
    let Some(continuation) = &query.continuation else {
        let prefix = match query.endpoint {
            Endpoint::Chat => "chatcmpl-",
            Endpoint::Completions => "cmpl-",
            Endpoint::Generate => "",
        };
        let id = match (&query.name, query.endpoint) {
            (Some(name), Endpoint::Generate) => name.clone(),
            _ => format!("{prefix}{:016x}", fastrand::u64(..)),
        };
        let since = SystemTime::UNIX_EPOCH.elapsed();
        return Some(Answers::to(query, id, since.map_or(0, |since| since.as_secs())));
    };
    let (id, created, cached) = Answers::from_opaque(&continuation.response)?;
    let mut answers = Answers::to(query, id, created);
    answers.choices[0].cached = cached;
    for (choice, begun) in answers.choices.iter_mut().zip(&continuation.choices) {
        choice.tokens.clone_from(&begun.token_ids);
        choice.sent = begun.token_ids.len();
        choice.complete = begun.finish_reason.is_some();
        choice.finish = begun.finish_reason.as_deref().map(|reason| match reason {
            "stop" => Finish::Stop,
            "abort" => Finish::Abort,
            _ => Finish::Length,
        });
    }
    Some(answers)
}

fn count(headers: &mut HeaderMap, answers: &Answers, cached: usize) {
    put(headers, "x-mla-prompt-tokens", &answers.prompt_tokens().to_string());
    // The counts of a batch are known when all its prompts have started.
    if answers.choices.len() == 1 {
        put(headers, "x-mla-cached-tokens", &cached.to_string());
    }
}

fn report_load(headers: &mut HeaderMap, state: &State) {
    let now = state.stats();
    put(headers, "x-mla-requests", &(now.running + now.waiting).to_string());
}

fn put(headers: &mut HeaderMap, name: &'static str, value: &str) {
    let value = HeaderValue::from_str(value).expect("contract: made of visible characters");
    headers.insert(name, value);
}

fn ok(body: impl Into<Bytes>) -> MockResponse {
    json_response(StatusCode::OK, body)
}

fn json_response(status: StatusCode, body: impl Into<Bytes>) -> MockResponse {
    let mut response = Response::new(MockBody::whole(body));
    *response.status_mut() = status;
    put(response.headers_mut(), "content-type", "application/json");
    response
}

fn refusal(status: StatusCode, message: &str) -> MockResponse {
    let error = json!({"message": message, "type": "mock", "param": null, "code": null});
    json_response(status, json!({"error": error}).to_string())
}

/// The error status of a fault, or of a full queue.
fn told(status: u16) -> MockResponse {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = refusal(status, "told to refuse");
    if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

fn garbage(form: Garbage, stream: bool) -> MockResponse {
    let (kind, text) = match (form, stream) {
        (Garbage::Html, _) => ("text/html", HTML),
        (_, true) => ("text/event-stream", r#"data: {"id":"x","choices":[{"ind"#),
        (_, false) => ("application/json", r#"{"id":"x","choices":[{"ind"#),
    };
    let body = match form {
        Garbage::Html | Garbage::Truncated => MockBody::whole(text),
        Garbage::EndlessLine => MockBody::endless(text),
        Garbage::Empty => MockBody::whole(""),
    };
    let mut response = Response::new(body);
    put(response.headers_mut(), "content-type", kind);
    response
}
