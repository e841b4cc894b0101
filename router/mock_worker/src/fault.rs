//! The faults of a mock worker.

use parking_lot::Mutex;
use serde::Deserialize;

/// Body of `POST /mock/fault`: `{"kind": "status", "status": 503, "count": 3}`. It replaces the
/// previous fault and applies to the next `count` generating requests, or until it is replaced.
#[derive(Clone, Debug, Deserialize)]
pub struct Fault {
    #[serde(flatten)]
    pub kind: Kind,
    pub count: Option<u32>,
}

/// With `after_tokens`, the fault of a stream occurs after this number of its tokens.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Kind {
    /// No fault.
    None,
    /// The process ends, at once or after this number of tokens of a request.
    Die { after_tokens: Option<usize> },
    /// The engine restarts with an empty cache: new `boot_id`, all connections closed.
    RestartEmpty,
    /// Requests are accepted and never answered.
    Hang,
    /// The engine stops behind a live HTTP server, like a scheduler after SIGSTOP: no further tokens come. A worker
    /// of this project reports that in `/health`.
    EngineStops,
    /// Streams stop, and their connections stay open.
    Freeze { after_tokens: usize },
    /// The connection closes within a response.
    Break { after_tokens: usize },
    /// Each step takes this many times as long.
    Slow { factor: f64 },
    /// Status 200 with a body that is not an answer.
    Garbage { form: Garbage },
    /// This status for every generating request. 429 and 503 come with Retry-After.
    Status { status: u16 },
    /// The framing of the response is invalid.
    BadChunking { after_tokens: usize },
    /// A stream ends without `[DONE]`.
    NoDone,
    /// A stream ends with `[DONE]` and a token after it.
    TokensAfterDone,
    /// A stream ends with the error event of a worker that has lost its engine.
    EngineDied { after_tokens: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Garbage {
    Html,
    /// Incomplete JSON with the requested content type.
    Truncated,
    /// One line without an end.
    EndlessLine,
    /// No body.
    Empty,
}

impl Fault {
    pub fn parse(json: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(json)
    }
}

impl From<Kind> for Fault {
    /// For every request.
    fn from(kind: Kind) -> Self {
        Self { kind, count: None }
    }
}

/// The present fault.
pub struct CurrentFault(Mutex<Fault>);

impl CurrentFault {
    pub fn new(fault: Option<Fault>) -> Self {
        Self(Mutex::new(fault.unwrap_or(Kind::None.into())))
    }

    pub fn set(&self, fault: Fault) {
        *self.0.lock() = fault;
    }

    /// Returns the fault for a request that arrives now.
    pub fn for_request(&self) -> Kind {
        let mut fault = self.0.lock();
        match &mut fault.count {
            Some(0) => return Kind::None,
            Some(count) => *count -= 1,
            None => {}
        }
        fault.kind.clone()
    }

    /// No step ends.
    pub fn stops_engine(&self) -> bool {
        self.0.lock().kind == Kind::EngineStops
    }

    /// Whether no request gets a token; requests to the engine itself get no response either.
    pub fn silences_engine(&self) -> bool {
        matches!(self.0.lock().kind, Kind::EngineStops | Kind::Hang)
    }

    /// Factor for the time of steps.
    pub fn slowness(&self) -> f64 {
        match self.0.lock().kind {
            Kind::Slow { factor } => factor,
            _ => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_fault_ends_after_its_count() {
        let fault = Fault::parse(r#"{"kind": "status", "status": 503, "count": 2}"#);
        let current = CurrentFault::new(Some(fault.expect("valid")));
        assert_eq!(current.for_request(), Kind::Status { status: 503 });
        assert_eq!(current.for_request(), Kind::Status { status: 503 });
        assert_eq!(current.for_request(), Kind::None);
        current.set(Fault::parse(r#"{"kind": "hang"}"#).expect("valid"));
        assert_eq!(current.for_request(), Kind::Hang);
        assert_eq!(current.for_request(), Kind::Hang);
    }

    #[test]
    fn an_unknown_kind_is_refused() {
        assert!(Fault::parse(r#"{"kind": "sulk"}"#).is_err());
        assert!(Fault::parse(r#"{"kind": "garbage", "form": "poem"}"#).is_err());
    }
}
