//! Reads the number of prompt tokens, and of cached prompt tokens, from an answer.

use http::{HeaderMap, HeaderName};

use crate::{
    correct::Usage,
    endpoint::Endpoint,
    engine::{CACHED_TOKENS, PROMPT_TOKENS, REQUESTS, usage},
    fleet::LoadGuard,
    proxy::Job,
    wire::headers::find,
};

/// Finds the counts in an event or in a whole body.
type Find = fn(&[u8]) -> Option<Usage>;

/// Reads one answer until the cached tokens are known.
#[derive(Debug, Default)]
pub struct Reader {
    find: Option<Find>,
}

impl Reader {
    /// Starts with the head of the response.
    pub fn new(job: &Job, headers: &HeaderMap, guard: &mut LoadGuard) -> Self {
        // As in bodies, a count beyond 32 bits is no count: sums of such counts would overflow.
        let number = |name: HeaderName| find(headers, &name)?.to_str().ok()?.parse::<u32>().ok();
        if let Some(requests) = number(REQUESTS) {
            guard.replica().record_reported_requests(requests);
        }
        let find: Find = match job.endpoint {
            _ if job.key.is_none() => return Self::default(),
            Endpoint::Generate => usage::of_generate,
            _ => usage::of_openai,
        };
        let mut reader = Self { find: Some(find) };
        let reported = Usage {
            prompt_tokens: number(PROMPT_TOKENS).map(u64::from),
            cached_tokens: number(CACHED_TOKENS).map(u64::from),
        };
        if reported.cached_tokens.is_some() {
            reader.report(job, guard, reported);
        }
        reader
    }

    /// Reads an event, or a whole body.
    pub fn read(&mut self, job: &Job, guard: &mut LoadGuard, json: &[u8]) {
        if let Some(reported) = self.find.and_then(|find| find(json)) {
            self.report(job, guard, reported);
        }
    }

    /// Handles the end of the answer. Counts it as unreported if the cached tokens are still unknown.
    pub fn ends(&mut self, guard: &LoadGuard) {
        if self.find.take().is_some() {
            guard.replica().counters.unreported.increment();
        }
    }

    /// Stops reading, because the following bytes come from another worker.
    pub fn close(&mut self) {
        self.find = None;
    }

    fn report(&mut self, job: &Job, guard: &mut LoadGuard, reported: Usage) {
        if let Some(key) = &job.key {
            job.router.learn(key, guard, reported);
        }
        if let Some(log) = &job.log {
            log.usage(reported.prompt_tokens, reported.cached_tokens);
        }
        if reported.cached_tokens.is_some() {
            self.close();
        }
    }
}
