//! Which path means what. The data plane is decided here; everything else is the admin router's.

use http::Method;

use crate::{error::Error, key};

/// A path as the metrics name it: a closed set, whatever clients ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    ChatCompletions,
    Completions,
    Generate,
    Responses,
    /// Any other `POST /v1/...`: the workers know it or answer 404.
    OtherV1,
    Tokenize,
    Detokenize,
    Models,
    ModelInfo,
    /// What the workers understand, as a document.
    OpenApi,
    /// Answered by the router itself.
    Admin,
}

impl Endpoint {
    pub const ALL: [Self; 11] = [
        Self::ChatCompletions,
        Self::Completions,
        Self::Generate,
        Self::Responses,
        Self::OtherV1,
        Self::Tokenize,
        Self::Detokenize,
        Self::Models,
        Self::ModelInfo,
        Self::OpenApi,
        Self::Admin,
    ];

    /// Where a request goes; wrong methods on paths of the data plane are refused here.
    pub fn of(method: &Method, path: &str) -> Result<Self, Error> {
        let endpoint = match path {
            "/v1/chat/completions" => Self::ChatCompletions,
            "/v1/completions" => Self::Completions,
            "/generate" => Self::Generate,
            "/v1/responses" => Self::Responses,
            "/tokenize" => Self::Tokenize,
            "/detokenize" => Self::Detokenize,
            "/get_model_info" | "/model_info" => Self::ModelInfo,
            "/openapi.json" => Self::OpenApi,
            "/v1/models" => Self::Models,
            _ if path.starts_with("/v1/models/") => Self::Models,
            _ if path.starts_with("/v1/") => Self::OtherV1,
            _ => return Ok(Self::Admin),
        };
        if method.as_str() == endpoint.method() {
            Ok(endpoint)
        } else {
            Err(Error::MethodNotAllowed { allow: Some(endpoint.method()) })
        }
    }

    /// Where the prompt lies in the body. `None`: no prompt that is worth a look, take the least
    /// loaded worker.
    pub fn key_route(self) -> Option<key::Route> {
        match self {
            Self::ChatCompletions => Some(key::Route::ChatCompletions),
            Self::Completions => Some(key::Route::Completions),
            Self::Generate => Some(key::Route::Generate),
            Self::Responses => Some(key::Route::Responses),
            _ => None,
        }
    }

    /// Keeps a worker busy for so long that it may have to wait for its turn.
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

    /// Answers with generated tokens; streamed, with events of which the last one says that it is.
    pub fn generates(self) -> bool {
        matches!(self, Self::ChatCompletions | Self::Completions | Self::Generate | Self::Responses)
    }

    pub fn method(self) -> &'static str {
        match self {
            Self::Models | Self::ModelInfo | Self::OpenApi => "GET",
            _ => "POST",
        }
    }

    /// The path of the data plane, as traces name it.
    pub fn route(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Generate => "/generate",
            Self::Responses => "/v1/responses",
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
