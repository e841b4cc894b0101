//! The endpoints. Paths of the data plane are recognised here; all other paths belong to the admin routes.

use http::Method;

use crate::{error::Error, key};

/// An endpoint: a closed set, so that clients cannot create new metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    ChatCompletions,
    Completions,
    Generate,
    Responses,
    /// Anthropic's API.
    Messages,
    /// Any other `POST /v1/...`: the worker knows the path or answers 404.
    OtherV1,
    Tokenize,
    Detokenize,
    Models,
    ModelInfo,
    /// The OpenAPI document of router and workers.
    OpenApi,
    /// Answered by the router itself.
    Admin,
}

impl Endpoint {
    pub const ALL: [Self; 12] = [
        Self::ChatCompletions,
        Self::Completions,
        Self::Generate,
        Self::Responses,
        Self::Messages,
        Self::OtherV1,
        Self::Tokenize,
        Self::Detokenize,
        Self::Models,
        Self::ModelInfo,
        Self::OpenApi,
        Self::Admin,
    ];

    /// The endpoint of a request. Fails with `MethodNotAllowed` for a wrong method on a data-plane path, and with
    /// `NotFound` for methods without a body on a path of /v1 that the router does not know.
    pub fn of(method: &Method, path: &str) -> Result<Self, Error> {
        let endpoint = match path {
            "/v1/chat/completions" => Self::ChatCompletions,
            "/v1/completions" => Self::Completions,
            "/generate" => Self::Generate,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            "/tokenize" => Self::Tokenize,
            "/detokenize" => Self::Detokenize,
            "/get_model_info" | "/model_info" | "/tokenizer_info" => Self::ModelInfo,
            "/openapi.json" => Self::OpenApi,
            "/v1/models" => Self::Models,
            _ if path.starts_with("/v1/models/") => Self::Models,
            _ if path.starts_with("/v1/") => Self::OtherV1,
            _ => return Ok(Self::Admin),
        };
        if method.as_str() == endpoint.method() {
            Ok(endpoint)
        } else if endpoint == Self::OtherV1 {
            Err(Error::NotFound(path.to_owned()))
        } else {
            Err(Error::MethodNotAllowed { allow: Some(endpoint.method()) })
        }
    }

    /// The place of the prompt in the body. `None` without a prompt for the router: the least loaded worker gets
    /// the request.
    pub fn key_route(self) -> Option<key::Route> {
        match self {
            Self::ChatCompletions => Some(key::Route::ChatCompletions),
            Self::Completions => Some(key::Route::Completions),
            Self::Generate => Some(key::Route::Generate),
            Self::Responses => Some(key::Route::Responses),
            Self::Messages => Some(key::Route::Messages),
            _ => None,
        }
    }

    /// Whether the request needs the engine, so that it may wait in the queue.
    pub fn is_work(self) -> bool {
        let is_light = matches!(
            self,
            Self::Tokenize
                | Self::Detokenize
                | Self::Models
                | Self::ModelInfo
                | Self::OpenApi
                | Self::Admin
        );
        !is_light
    }

    /// Whether the response has generated tokens. A stream of such a response ends with a last event.
    pub fn generates(self) -> bool {
        matches!(
            self,
            Self::ChatCompletions
                | Self::Completions
                | Self::Generate
                | Self::Responses
                | Self::Messages
        )
    }

    pub fn method(self) -> &'static str {
        match self {
            Self::Models | Self::ModelInfo | Self::OpenApi => "GET",
            _ => "POST",
        }
    }

    /// The route for traces; empty for admin endpoints.
    pub fn route(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Generate => "/generate",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::OtherV1 => "/v1/*",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
            Self::Models => "/v1/models",
            Self::ModelInfo => "/get_model_info",
            Self::OpenApi => "/openapi.json",
            Self::Admin => "",
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat_completions",
            Self::Completions => "completions",
            Self::Generate => "generate",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::OtherV1 => "v1_other",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
            Self::Models => "models",
            Self::ModelInfo => "model_info",
            Self::OpenApi => "openapi",
            Self::Admin => "router",
        }
    }
}
