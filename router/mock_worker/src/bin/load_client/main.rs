//! A load generator for benches. Prints the latencies of its requests as one line of JSON.
//!
//! `hammer` sends bodies of one size as fast as they are answered. `converse` plays conversations from stdin, one JSON
//! object a line, `{"at": seconds, "system": text, "turns": [text, ...], "max_tokens": n}`. The prompt of each turn has
//! all earlier turns and their answers. `streams` keeps many live streams of `paced_worker` open, and sends short
//! requests on other connections.

#![forbid(unsafe_code)]

mod converse;
mod hammer;
mod streams;

use std::{fmt::Display, io};

use clap::{Parser, Subcommand};
use serde_json::{Value, json};
use tokio::task::LocalSet;

use self::{converse::Converse, hammer::Hammer, streams::Streams};

const CHAT: &str = "/v1/chat/completions";

/// Put load on a router
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    kind: Load,
}

#[derive(Subcommand)]
enum Load {
    Hammer(Hammer),
    Converse(Converse),
    Streams(Streams),
}

/// Latencies in seconds.
#[derive(Default)]
struct Felt {
    latencies: Vec<f64>,
    first_tokens: Vec<f64>,
    errors: usize,
    /// The first error.
    error: Option<String>,
    completion_tokens: u64,
    prompt_tokens: u64,
}

impl Felt {
    fn failed(&mut self, error: &dyn Display) {
        self.errors += 1;
        self.error.get_or_insert_with(|| error.to_string());
    }

    fn report(mut self, seconds: f64) -> Value {
        json!({
            "requests": self.latencies.len(),
            "errors": self.errors,
            "error": self.error,
            "seconds": seconds,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "latency": quantiles(&mut self.latencies),
            "ttft": quantiles(&mut self.first_tokens),
        })
    }
}

fn quantiles(values: &mut [f64]) -> Value {
    values.sort_unstable_by(f64::total_cmp);
    // In thousandths.
    let at = |share: usize| values.get((values.len() * share / 1000).min(values.len() - 1));
    if values.is_empty() {
        return Value::Null;
    }
    json!({"p50": at(500), "p90": at(900), "p99": at(990), "max": at(1000)})
}

fn main() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(LocalSet::new().run_until(async {
        match Arguments::parse().kind {
            Load::Hammer(hammer) => Ok(hammer.run().await),
            Load::Streams(streams) => Ok(streams.run().await),
            Load::Converse(converse) => converse.run().await,
        }
    }));
    println!("{}", report?);
    Ok(())
}
