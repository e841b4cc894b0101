//! Every way in which the router itself answers no, and the one map from there to HTTP.

mod refusal;
mod start;

use std::{fmt::Display, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde_json::{Value, json};
use thiserror::Error;

pub use refusal::Refusal;
pub use start::StartError;

/// An answer that comes from the router and not from a worker.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    #[error("the request body is larger than {limit} bytes, the limit set by --max-payload-size")]
    PayloadTooLarge { limit: usize },
    #[error("the bodies of all requests together would take more than {limit} bytes")]
    BodiesTooLarge { limit: usize },
    #[error("the request body could not be read: {0}")]
    BadBody(String),
    #[error("the request cannot be read: {0}")]
    BadHead(&'static str),
    #[error("the head of the request is too large")]
    HeadTooLarge,
    #[error("the request has more than {limit} header fields")]
    TooManyFields { limit: usize },
    #[error("the request's target has more than {limit} bytes")]
    UriTooLong { limit: usize },
    #[error("the head of the request did not arrive within {after:?}")]
    HeadTimeout { after: Duration },
    #[error("nothing of the request's body arrived for {after:?}")]
    BodyTimeout { after: Duration },
    #[error(
        "the request's body came slower than {rate} bytes a second, the limit set by --body-min-rate"
    )]
    BodyTooSlow { rate: u32 },
    #[error("{limit} connections are open, the limit set by --max-connections or by open files")]
    TooManyConnections { limit: usize },
    #[error("the request has both a content length and a transfer encoding")]
    AmbiguousLength,
    #[error("{message}")]
    BadRequest { param: &'static str, message: String },
    #[error("missing or wrong API key; send it as `Authorization: Bearer KEY`")]
    Unauthorized,
    #[error("this router is not addressed as {0}; if it should be, name it by --allowed-hosts")]
    ForeignHost(String),
    #[error(
        "web pages of {0} may not send this request; --cors-allowed-origins names origins that may"
    )]
    ForeignOrigin(String),
    #[error("unknown path: {0}")]
    NotFound(String),
    #[error("this path does not take that method")]
    MethodNotAllowed { allow: Option<&'static str> },
    #[error("worker {0} is already registered")]
    WorkerExists(String),
    #[error("no worker {0} is registered")]
    WorkerUnknown(String),
    #[error("no worker is healthy; waited {waited:?} for one")]
    NoHealthyWorker { waited: Duration },
    #[error("{limit} requests already wait for a worker")]
    QueueFull { limit: usize, retry_after: u64 },
    #[error(
        "at the present rate a worker would take the request after {wait:.0?}, and --queue-timeout-secs allows \
         {limit:?}"
    )]
    QueueSlow { wait: Duration, limit: Duration, retry_after: u64 },
    #[error("no worker could take the request within {waited:?}")]
    QueueTimeout { waited: Duration, retry_after: u64 },
    #[error("the router is shutting down")]
    Draining,
    #[error("no worker answered; tried {attempts}, last: {last}")]
    WorkersFailed { attempts: u32, last: String },
    /// The answer is the worker's own: nobody had a better one.
    #[error("the worker answered {}", .0.status)]
    Refused(Box<Refusal>),
    #[error("each of {deaths} workers broke the connection or froze when it had this request")]
    Poisonous { deaths: u32 },
    #[error("the request was not answered within {after:?}")]
    Timeout { after: Duration },
}

impl From<Box<Refusal>> for Error {
    fn from(refusal: Box<Refusal>) -> Self {
        Self::Refused(refusal)
    }
}

/// OpenAI's error shape.
pub fn openai(message: &impl Display, kind: &str, param: Option<&str>, code: &str) -> Value {
    json!({
        "error": {
            "message": message.to_string(),
            "type": kind,
            "param": param,
            "code": code,
        }
    })
}

impl Error {
    /// The one status map: status, OpenAI's `type`, a stable `code`.
    pub fn status(&self) -> (StatusCode, &'static str, &'static str) {
        const INVALID: &str = "invalid_request_error";
        const SERVER: &str = "server_error";
        match self {
            Self::BodiesTooLarge { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, SERVER, "bodies_too_large")
            }
            Self::PayloadTooLarge { .. } => {
                (StatusCode::PAYLOAD_TOO_LARGE, INVALID, "payload_too_large")
            }
            Self::BadBody(_) => (StatusCode::BAD_REQUEST, INVALID, "bad_body"),
            Self::BadHead(_) => (StatusCode::BAD_REQUEST, INVALID, "bad_head"),
            Self::HeadTooLarge | Self::TooManyFields { .. } => {
                (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, INVALID, "head_too_large")
            }
            Self::UriTooLong { .. } => (StatusCode::URI_TOO_LONG, INVALID, "uri_too_long"),
            Self::TooManyConnections { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, SERVER, "too_many_connections")
            }
            Self::HeadTimeout { .. } | Self::BodyTimeout { .. } | Self::BodyTooSlow { .. } => {
                (StatusCode::REQUEST_TIMEOUT, INVALID, "request_timeout")
            }
            Self::AmbiguousLength => (StatusCode::BAD_REQUEST, INVALID, "ambiguous_length"),
            Self::BadRequest { .. } => (StatusCode::BAD_REQUEST, INVALID, "invalid_value"),
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, INVALID, "invalid_api_key"),
            Self::ForeignHost(_) => (StatusCode::FORBIDDEN, INVALID, "host_not_allowed"),
            Self::ForeignOrigin(_) => (StatusCode::FORBIDDEN, INVALID, "origin_not_allowed"),
            Self::NotFound(_) => (StatusCode::NOT_FOUND, INVALID, "unknown_path"),
            Self::MethodNotAllowed { .. } => {
                (StatusCode::METHOD_NOT_ALLOWED, INVALID, "method_not_allowed")
            }
            Self::WorkerExists(_) => (StatusCode::CONFLICT, INVALID, "worker_exists"),
            Self::WorkerUnknown(_) => (StatusCode::NOT_FOUND, INVALID, "worker_unknown"),
            Self::NoHealthyWorker { .. } => {
                (StatusCode::SERVICE_UNAVAILABLE, SERVER, "no_healthy_worker")
            }
            Self::QueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, SERVER, "queue_full"),
            Self::QueueSlow { .. } => (StatusCode::TOO_MANY_REQUESTS, SERVER, "queue_slow"),
            Self::QueueTimeout { .. } => (StatusCode::SERVICE_UNAVAILABLE, SERVER, "queue_timeout"),
            Self::Draining => (StatusCode::SERVICE_UNAVAILABLE, SERVER, "draining"),
            Self::WorkersFailed { .. } => (StatusCode::BAD_GATEWAY, SERVER, "workers_failed"),
            Self::Refused(refusal) => (refusal.status, SERVER, "worker_refused"),
            Self::Poisonous { .. } => {
                (StatusCode::INTERNAL_SERVER_ERROR, SERVER, "request_kills_workers")
            }
            Self::Timeout { .. } => (StatusCode::GATEWAY_TIMEOUT, SERVER, "timeout"),
        }
    }

    /// The field at fault, where there is one.
    fn param(&self) -> Option<&'static str> {
        match self {
            Self::BadRequest { param, .. } => Some(param),
            _ => None,
        }
    }

    /// OpenAI's error shape.
    pub fn to_response(&self) -> Response<Full<Bytes>> {
        if let Self::Refused(refusal) = self {
            return refusal.to_response();
        }
        let (status, kind, code) = self.status();
        let body = openai(self, kind, self.param(), code);
        let mut response = Response::new(Full::from(body.to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self {
            Self::QueueFull { retry_after, .. }
            | Self::QueueSlow { retry_after, .. }
            | Self::QueueTimeout { retry_after, .. } => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(*retry_after));
            }
            Self::Poisonous { .. } => {
                // OpenAI's clients would try a 500 again by themselves.
                let name = HeaderName::from_static("x-should-retry");
                headers.insert(name, HeaderValue::from_static("false"));
            }
            // One second: the pace of health checks, after which a retry can meet another state.
            _ if matches!(status.as_u16(), 429 | 502 | 503) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Self::MethodNotAllowed { allow: Some(allow) } => {
                headers.insert(header::ALLOW, HeaderValue::from_static(allow));
            }
            Self::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}
