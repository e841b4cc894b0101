//! The failure of one attempt on one worker.

use std::time::Duration;

use thiserror::Error;

use crate::{error::Refusal, fleet::Outcome, metrics::UpstreamFailure, upstream::UpstreamError};

/// Why an attempt has no usable response.
#[derive(Debug, Error)]
pub(super) enum AttemptError {
    /// Status 429 or 503: backpressure. It says nothing about the next request.
    #[error("it is busy: {}", .0.status)]
    Busy(Box<Refusal>),
    /// Status 500, 502 or 504.
    #[error("it answered {}", .0.status)]
    Failed(Box<Refusal>),
    /// Status 200 with a body that is not an answer of the API.
    #[error("it answered 200 with {0}")]
    Garbage(&'static str),
    #[error(transparent)]
    Broken(#[from] UpstreamError),
    /// The health checks have found the worker dead or frozen.
    #[error("it was lost")]
    Lost,
    #[error("no first byte within {0:?}")]
    Late(Duration),
    /// The deadline of the request has passed.
    #[error("the request's time was up")]
    Deadline,
}

impl AttemptError {
    /// Whether the retry is free: it takes nothing from the retry budget and needs no pause. Load has not caused such
    /// an error, and the retry adds no request to the workers that are alive.
    pub(super) fn needs_no_budget(&self) -> bool {
        matches!(self, Self::Broken(_) | Self::Lost)
    }

    /// Whether the request may have killed or frozen the worker.
    pub(super) fn is_death(&self) -> bool {
        matches!(
            self,
            Self::Broken(UpstreamError::Reset(_) | UpstreamError::Cut(_))
                | Self::Lost
                | Self::Late(_)
        )
    }

    /// The label of this error in the metrics.
    pub(super) fn failure(&self) -> UpstreamFailure {
        match self {
            Self::Busy(_) => UpstreamFailure::Busy,
            Self::Failed(_) => UpstreamFailure::Status,
            Self::Garbage(_) => UpstreamFailure::Garbage,
            Self::Broken(UpstreamError::Connect(_) | UpstreamError::ConnectTimeout(_)) => {
                UpstreamFailure::Connect
            }
            Self::Broken(_) => UpstreamFailure::Reset,
            Self::Lost => UpstreamFailure::Lost,
            Self::Late(_) | Self::Deadline => UpstreamFailure::Timeout,
        }
    }

    /// The outcome for the circuit breaker of the worker; `None` if the error says nothing about the worker.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        match self {
            Self::Busy(_) => Some(Outcome::Busy),
            Self::Broken(error) if error.is_local() => None,
            Self::Failed(_) | Self::Garbage(_) | Self::Broken(_) => Some(Outcome::Failed),
            Self::Late(limit) => Some(Outcome::Late(*limit)),
            Self::Lost | Self::Deadline => None,
        }
    }
}
