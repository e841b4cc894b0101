//! Conversations. The prompt of each turn has all earlier turns and their answers.

use std::{
    cell::RefCell,
    io::{self, BufRead},
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Args;
use mla_mock_worker::client::{Client, post};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{sync::Semaphore, time::sleep_until};

use super::{CHAT, Felt};

/// Conversations from stdin
#[derive(Args, Clone)]
pub(crate) struct Converse {
    address: SocketAddr,
    /// Conversations at a time; each has a connection of its own
    #[arg(long, default_value_t = 64)]
    concurrency: usize,
}

/// One line of stdin.
#[derive(Deserialize)]
struct Conversation {
    /// Start time in seconds.
    #[serde(default)]
    at: f64,
    system: String,
    turns: Vec<String>,
    max_tokens: usize,
}

impl Converse {
    pub(crate) async fn run(self) -> io::Result<Value> {
        let lines = io::stdin().lock().lines();
        let conversations: Vec<Conversation> =
            lines.map(|line| Ok(serde_json::from_str(&line?)?)).collect::<io::Result<_>>()?;
        let places = Arc::new(Semaphore::new(self.concurrency));
        let felt = Rc::new(RefCell::new(Felt::default()));
        let begun = Instant::now();
        let mut running = Vec::new();
        for conversation in conversations {
            sleep_until((begun + Duration::from_secs_f64(conversation.at)).into()).await;
            let place = Arc::clone(&places).acquire_owned().await;
            let felt = Rc::clone(&felt);
            running.push(tokio::task::spawn_local(async move {
                if let Err(error) = conversation.play(self.address, &felt).await {
                    felt.borrow_mut().failed(&error);
                }
                drop(place);
            }));
        }
        for conversation in running {
            conversation.await.expect("contract: it does not panic");
        }
        Ok(felt.take().report(begun.elapsed().as_secs_f64()))
    }
}

/// The fields of an event that are measured.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Delta,
}

#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    content: String,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

impl Conversation {
    async fn play(&self, address: SocketAddr, felt: &RefCell<Felt>) -> io::Result<()> {
        let mut client = Client::connect(address).await?;
        let mut messages = vec![json!({"role": "system", "content": self.system})];
        for turn in &self.turns {
            messages.push(json!({"role": "user", "content": turn}));
            let request = json!({"model": "mock", "messages": messages, "stream": true,
                "max_tokens": self.max_tokens, "stream_options": {"include_usage": true}});
            let begun = Instant::now();
            client.send(&post(CHAT, "", &request.to_string())).await?;
            let head = client.head().await?;
            let mut body = Vec::new();
            client.more(&mut body).await?;
            let first = begun.elapsed();
            while client.more(&mut body).await? {}
            let whole = begun.elapsed();
            let body = String::from_utf8_lossy(&body);
            if head.status != 200 || !body.ends_with("data: [DONE]\n\n") {
                let end: String = body.chars().skip(body.len().saturating_sub(200)).collect();
                return Err(io::Error::other(format!("{}: ...{end}", head.status)));
            }
            let mut answer = String::new();
            let mut felt = felt.borrow_mut();
            let lines = body.lines().filter_map(|line| line.strip_prefix("data: "));
            for data in lines.filter(|data| *data != "[DONE]") {
                let chunk: Chunk = serde_json::from_str(data)?;
                for choice in chunk.choices {
                    answer += &choice.delta.content;
                }
                if let Some(usage) = chunk.usage {
                    felt.prompt_tokens += usage.prompt_tokens;
                    felt.completion_tokens += usage.completion_tokens;
                }
            }
            felt.first_tokens.push(first.as_secs_f64());
            felt.latencies.push(whole.as_secs_f64());
            messages.push(json!({"role": "assistant", "content": answer}));
        }
        Ok(())
    }
}
