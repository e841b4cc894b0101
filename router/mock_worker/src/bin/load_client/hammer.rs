//! Requests of one size, each connection at full speed.

use std::{
    borrow::Cow,
    cell::RefCell,
    io,
    net::SocketAddr,
    rc::Rc,
    time::{Duration, Instant},
};

use clap::Args;
use memchr::memmem;
use mla_mock_worker::client::{Client, post};
use serde_json::Value;

use super::{CHAT, Felt};

/// Placeholder for the part in which a cold prompt differs from all others.
const COLD: &str = "<<< different >>";

/// Requests of one size, each connection at full speed
#[derive(Args, Clone)]
pub(crate) struct Hammer {
    address: SocketAddr,
    #[arg(long, default_value_t = 1)]
    connections: usize,
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// Bytes of prompt, about
    #[arg(long, default_value_t = 2048)]
    size: usize,
    /// Different prompts, in turn
    #[arg(long, default_value_t = 64)]
    prompts: usize,
    /// Make every prompt cold
    #[arg(long)]
    cold: bool,
    /// Ask for events
    #[arg(long)]
    stream: bool,
}

impl Hammer {
    pub(crate) async fn run(self) -> Value {
        let felt = Rc::new(RefCell::new(Felt::default()));
        let requests: Rc<[_]> = (0..self.prompts).map(|prompt| self.request(prompt)).collect();
        let shared = Rc::new(self);
        let begun = Instant::now();
        let end = begun + Duration::from_secs_f64(shared.seconds);
        let connections: Vec<_> = (0..shared.connections)
            .map(|number| {
                let (hammer, felt) = (Rc::clone(&shared), Rc::clone(&felt));
                let requests = Rc::clone(&requests);
                tokio::task::spawn_local(async move {
                    let connected = hammer.connection(number, &requests, end, &felt).await;
                    if let Err(error) = connected {
                        felt.borrow_mut().failed(&error);
                    }
                })
            })
            .collect();
        for connection in connections {
            connection.await.expect("contract: it does not panic");
        }
        felt.take().report(begun.elapsed().as_secs_f64())
    }

    async fn connection(
        &self,
        number: usize,
        requests: &[Vec<u8>],
        end: Instant,
        felt: &RefCell<Felt>,
    ) -> io::Result<()> {
        let mut client = Client::connect(self.address).await?;
        let mut body = Vec::new();
        // Connections start at different prompts.
        for count in number * 7.. {
            let mut request = Cow::from(&requests[count % self.prompts]);
            if self.cold {
                let mark = memmem::find(&request, COLD.as_bytes()).expect("contract: it is there");
                let unique = format!("{:016x}", (number as u64) << 40 | count as u64);
                request.to_mut()[mark..mark + COLD.len()].copy_from_slice(unique.as_bytes());
            }
            let begun = Instant::now();
            if begun >= end {
                return Ok(());
            }
            client.send(&request).await?;
            let head = client.head().await?;
            body.clear();
            let mut first = None;
            while client.more(&mut body).await? {
                first.get_or_insert_with(|| begun.elapsed());
            }
            let mut felt = felt.borrow_mut();
            if head.status == 200 {
                felt.latencies.push(begun.elapsed().as_secs_f64());
                felt.first_tokens.extend(first.map(|first| first.as_secs_f64()));
            } else {
                felt.failed(&format_args!("status {}", head.status));
            }
        }
        Ok(())
    }

    /// Returns a request whose system message is two thirds of its text.
    fn request(&self, prompt: usize) -> Vec<u8> {
        let text = |length: usize, seed: usize| {
            let mut text = String::new();
            while text.len() < length {
                let word = (seed * 7919 + text.len() * 31) % 99_991;
                text.extend(["w", &word.to_string(), " "]);
            }
            text.truncate(length);
            text
        };
        let mark = if self.cold { COLD } else { "" };
        let system = text(self.size * 2 / 3, prompt + 1);
        let user = text(self.size / 3, prompt + 1001);
        let stream = if self.stream { r#","stream":true"# } else { "" };
        post(
            CHAT,
            "",
            &format!(
                r#"{{"model":"mock","messages":[{{"role":"system","content":"{mark}{system}"}},{{"role":"user","content":"{user}"}}],"max_tokens":16{stream}}}"#
            ),
        )
    }
}
