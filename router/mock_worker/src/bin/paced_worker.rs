//! Engines whose streams have one event in each interval, to measure the cost of thousands of live streams in a
//! router. Each event has its number and the time of its write.
//!
//!     paced_worker FIRST_PORT COUNT EVENTS INTERVAL_MS [steps]
//!
//! With `steps` all streams have their events at the same times, like the streams of an engine that decodes them in one
//! batch.

#![forbid(unsafe_code)]

use std::{
    env, io,
    net::Ipv4Addr,
    time::{Duration, SystemTime},
};

use mla_mock_worker::raw::{self, Asked, request_length};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{Instant, sleep_until},
};

/// Buffer size for a typical request.
const READ: usize = 4096;

/// The events of each stream.
#[derive(Clone, Copy)]
struct Pace {
    events: u32,
    interval: Duration,
    /// The time of one step, if all streams have the same steps.
    step: Option<Instant>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> io::Result<()> {
    let usage = "usage: paced_worker FIRST_PORT COUNT EVENTS INTERVAL_MS [steps]";
    let mut words = env::args().skip(1);
    let [first, count, events, interval] =
        [(); 4].map(|()| words.next().and_then(|word| word.parse::<u32>().ok()).expect(usage));
    let step = words.next().map(|word| {
        assert_eq!(word, "steps", "{usage}");
        Instant::now()
    });
    let pace = Pace { events, interval: Duration::from_millis(u64::from(interval)), step };
    let mut engines = JoinSet::new();
    for port in first..first + count {
        let port = u16::try_from(port).expect(usage);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
        engines.spawn(async move {
            loop {
                let (stream, _) = listener.accept().await?;
                // A disconnected client ends its connection with an error.
                tokio::spawn(async move { serve(stream, pace).await });
            }
        });
    }
    // A thread returns only with an error.
    engines.join_next().await.expect(usage).expect("contract: it does not panic")
}

/// Answers one request after the other, until the client closes.
async fn serve(mut stream: TcpStream, pace: Pace) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(READ);
    loop {
        match request_length(&buffer) {
            Some(length) if length <= buffer.len() => {
                let asked = Asked::of(&buffer[..length]);
                buffer.drain(..length);
                match asked {
                    Asked::Stream => pace.play(&mut stream).await?,
                    Asked::Whole => stream.write_all(raw::whole(raw::CHAT).as_bytes()).await?,
                    Asked::Info => stream.write_all(raw::whole(raw::INFO).as_bytes()).await?,
                }
            }
            _ if stream.read_buf(&mut buffer).await? == 0 => return Ok(()),
            _ => {}
        }
    }
}

impl Pace {
    /// The time of the first event of a stream that starts now.
    fn first(self) -> Instant {
        let now = Instant::now();
        let Some(step) = self.step else { return now };
        let late = (now - step).as_nanos() % self.interval.as_nanos().max(1);
        now + self.interval - Duration::from_nanos(late as u64)
    }

    async fn play(self, stream: &mut TcpStream) -> io::Result<()> {
        stream.write_all(raw::STREAM.as_bytes()).await?;
        let begun = self.first();
        for number in 0..self.events {
            sleep_until(begun + self.interval * number).await;
            let time = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_micros());
            let event = format!(
                "data: {{\"id\":\"x\",\"object\":\"chat.completion.chunk\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{number} {time}\"}}}}]}}\n\n"
            );
            stream.write_all(raw::chunk(&event).as_bytes()).await?;
        }
        stream.write_all(raw::DONE.as_bytes()).await
    }
}
