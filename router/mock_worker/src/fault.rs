//! The faults of a mock worker.

use parking_lot::Mutex;
use serde::Deserialize;

/// Body of `POST /mock/fault`: `{"kind": "status", "status": 503, "count": 3}`. It replaces the one
/// before and holds for the next `count` generating requests, or until it is replaced.
#[derive(Clone, Debug, Deserialize)]
pub struct Fault {
    #[serde(flatten)]
    pub kind: Kind,
    pub count: Option<u32>,
}

/// Where `after_tokens` is given, a stream's fault strikes once so many of its tokens have been sent.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Kind {
    /// All is well again.
    None,
    /// The process ends: at once, or when a request has got so many tokens.
    Die { after_tokens: Option<usize> },
    /// The engine is another one, its cache empty: new `boot_id`, all connections closed.
    RestartEmpty,
    /// Requests are taken and never answered.
    Hang,
    /// The engine stops behind a live HTTP server, like a scheduler after SIGSTOP: no further tokens come. A worker
    /// of this project reports that in `/health`.
    EngineStops,
    /// Streams stop, their connections stay open.
    Freeze { after_tokens: usize },
    /// The connection closes within a response.
    Break { after_tokens: usize },
    /// Every step takes so many times as long.
    Slow { factor: f64 },
    /// 200, but not an answer.
    Garbage { form: Garbage },
    /// This status for everything that generates. 429 and 503 come with Retry-After.
    Status { status: u16 },
    /// The framing of a response goes wrong.
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
    /// Nothing at all.
    Empty,
}

impl Fault {
    pub fn parse(json: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(json)
    }
}

impl From<Kind> for Fault {
    /// For every request from now on.
    fn from(kind: Kind) -> Self {
        Self { kind, count: None }
    }
}

/// The fault that is in force.
pub struct CurrentFault(Mutex<Fault>);

impl CurrentFault {
    pub fn new(fault: Option<Fault>) -> Self {
        Self(Mutex::new(fault.unwrap_or(Kind::None.into())))
    }

    pub fn set(&self, fault: Fault) {
        *self.0.lock() = fault;
    }

    /// What happens to a request that comes in now.
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

    /// By how much steps are longer.
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
