//! Many live streams and short requests, each connection in its own task.

use std::{
    cell::RefCell,
    io,
    net::SocketAddr,
    rc::Rc,
    time::{Duration, Instant, SystemTime},
};

use clap::Args;
use mla_mock_worker::client::{Client, post};
use serde_json::{Value, json};
use tokio::time::sleep_until;

use super::{CHAT, Felt, quantiles};

/// The text before number and time in an event of `paced_worker`.
const CONTENT: &str = "\"content\":\"";

/// Streams of `paced_worker`, and connections with short requests
#[derive(Args, Clone)]
pub(crate) struct Streams {
    /// Addresses of the workers or routers; connections are assigned round robin
    #[arg(required = true)]
    addresses: Vec<SocketAddr>,
    /// Connections with one stream after another
    #[arg(long, default_value_t = 1000)]
    live: u32,
    /// Connections with a short request at intervals
    #[arg(long, default_value_t = 1000)]
    others: u32,
    /// Events of each stream
    #[arg(long, default_value_t = 20)]
    events: u64,
    /// Seconds between two short requests of a connection
    #[arg(long, default_value_t = 5.0)]
    pause_s: f64,
    /// Seconds in which all connections start, one after the other
    #[arg(long, default_value_t = 5.0)]
    ramp_s: f64,
    /// Seconds after which no stream or request is started
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
}

/// Latencies of the streams.
#[derive(Default)]
struct Streamed {
    whole: u64,
    events: u64,
    /// Seconds from the engine's write to the client's read, after the ramp.
    delays: Vec<f64>,
}

impl Streams {
    pub(crate) async fn run(self) -> Value {
        let load = Rc::new(self);
        let felt = Rc::new(RefCell::new(Felt::default()));
        let streamed = Rc::new(RefCell::new(Streamed::default()));
        let begun = Instant::now();
        let count = load.live + load.others;
        let connections: Vec<_> = (0..count)
            .map(|number| {
                let (load, felt, streamed) =
                    (Rc::clone(&load), Rc::clone(&felt), Rc::clone(&streamed));
                tokio::task::spawn_local(async move {
                    let share = f64::from(number) / f64::from(count);
                    let start = begun + Duration::from_secs_f64(load.ramp_s * share);
                    sleep_until(start.into()).await;
                    let address = load.addresses[number as usize % load.addresses.len()];
                    // Spreads the streams evenly over the numbers.
                    let is_stream = u64::from(number) * u64::from(load.live) / u64::from(count)
                        != u64::from(number + 1) * u64::from(load.live) / u64::from(count);
                    let played = if is_stream {
                        load.stream(address, number, begun, &streamed).await
                    } else {
                        load.other(address, number, begun, &felt).await
                    };
                    if let Err(error) = played {
                        felt.borrow_mut().failed(&error);
                    }
                })
            })
            .collect();
        for connection in connections {
            connection.await.expect("contract: it does not panic");
        }
        let mut report = felt.take().report(begun.elapsed().as_secs_f64());
        let Streamed { whole, events, mut delays } = streamed.take();
        report["streams"] = json!(whole);
        report["events"] = json!(events);
        report["event_delay"] = quantiles(&mut delays);
        report
    }

    fn is_over(&self, begun: Instant) -> bool {
        begun.elapsed().as_secs_f64() >= self.ramp_s + self.seconds
    }

    /// Reads one stream after another. A missing or repeated event is an error.
    async fn stream(
        &self,
        address: SocketAddr,
        number: u32,
        begun: Instant,
        streamed: &RefCell<Streamed>,
    ) -> io::Result<()> {
        let mut client = Client::connect(address).await?;
        let request = post(CHAT, "", &chat(number, r#","stream":true"#));
        let mut text = Vec::new();
        while !self.is_over(begun) {
            client.send(&request).await?;
            let status = client.head().await?.status;
            let (mut next, mut done) = (0, false);
            text.clear();
            while client.more(&mut text).await? {
                let counts = begun.elapsed().as_secs_f64() >= self.ramp_s;
                while let Some(end) = memchr::memmem::find(&text, b"\n\n") {
                    let event = String::from_utf8_lossy(&text[..end]);
                    if let Some((count, time)) = stamp(&event) {
                        if count != next {
                            return Err(io::Error::other(format!("event {count}, not {next}")));
                        }
                        next += 1;
                        let delay = since_epoch().saturating_sub(time) as f64 / 1e6;
                        let streamed = &mut *streamed.borrow_mut();
                        streamed.events += 1;
                        streamed.delays.extend(counts.then_some(delay));
                    }
                    done |= event == "data: [DONE]";
                    text.drain(..end + 2);
                }
            }
            if status != 200 || next != self.events || !done {
                let broken = format!("status {status}, {next} events, done: {done}");
                return Err(io::Error::other(broken));
            }
            streamed.borrow_mut().whole += 1;
        }
        Ok(())
    }

    /// Sends a short request at each interval.
    async fn other(
        &self,
        address: SocketAddr,
        number: u32,
        begun: Instant,
        felt: &RefCell<Felt>,
    ) -> io::Result<()> {
        let mut client = Client::connect(address).await?;
        let request = post(CHAT, "", &chat(number, ""));
        while !self.is_over(begun) {
            let asked = Instant::now();
            client.send(&request).await?;
            let (head, _) = client.response().await?;
            if head.status != 200 {
                return Err(io::Error::other(format!("status {}", head.status)));
            }
            felt.borrow_mut().latencies.push(asked.elapsed().as_secs_f64());
            sleep_until((asked + Duration::from_secs_f64(self.pause_s)).into()).await;
        }
        Ok(())
    }
}

/// Returns a different chat for each connection.
fn chat(number: u32, rest: &str) -> String {
    let text = format!("{number} tells a tale of its own. ").repeat(20);
    format!(
        r#"{{"model":"mock","messages":[{{"role":"user","content":"{text}"}}],"max_tokens":16{rest}}}"#
    )
}

/// Returns the number and the time of an event.
fn stamp(event: &str) -> Option<(u64, u64)> {
    let (_, content) = event.split_once(CONTENT)?;
    let (number, time) = content.split_once('"')?.0.split_once(' ')?;
    Some((number.parse().ok()?, time.parse().ok()?))
}

/// Returns the time in microseconds. It is comparable with the time of the engine, because both run on one machine.
fn since_epoch() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_micros() as u64)
}
