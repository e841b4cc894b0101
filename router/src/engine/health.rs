//! The body of a worker's health check, and the path that asks an engine to generate a token.

use serde::Deserialize;

/// SGLang's path: the engine generates one token, or the server waits for a sign of the scheduler.
pub(crate) const GENERATE_PATH: &str = "/health_generate";

/// The JSON body of a health check, which only this project's workers send. For other bodies all fields are empty.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct HealthReport {
    status: String,
    /// Seconds since the scheduler last made progress.
    last_step_age: Option<f64>,
}

impl HealthReport {
    pub(crate) fn parse(body: &[u8]) -> Self {
        serde_json::from_slice(body).unwrap_or_default()
    }

    /// Whether the worker says that its engine makes no progress.
    pub(crate) fn is_stuck(&self) -> bool {
        self.status == "stuck"
    }

    /// Whether a good check covers the engine, and not only the HTTP server.
    pub(crate) fn covers_engine(&self) -> bool {
        self.last_step_age.is_some()
    }
}
