//! The `mla-mock-worker` command: one mock engine, or several on consecutive ports.

#![forbid(unsafe_code)]

use std::{io, net::SocketAddr, process::ExitCode, sync::Arc};

use clap::Parser;
use mla_mock_worker::{Lockstep, MockWorker, Port, Settings};
use tokio::task::JoinSet;

/// Play an engine, for tests and benches of a router
#[derive(Parser)]
#[command(name = "mla-mock-worker", version)]
struct Arguments {
    /// Address to listen on; with port 0 a free one is taken and printed
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    listen: SocketAddr,

    /// Engines, on this port and those after it
    #[arg(long, value_name = "N", default_value_t = 1)]
    count: u16,

    /// Steps of all engines take as long as the slowest one's, like those of ranks that share experts
    #[arg(long)]
    lockstep: bool,

    #[command(flatten)]
    settings: Settings,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        // An injected crash ends with a failure status.
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("mla-mock-worker: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns when the first worker has died.
async fn run(arguments: Arguments) -> io::Result<()> {
    let mut workers = JoinSet::new();
    let lockstep = arguments.lockstep.then(|| Arc::new(Lockstep::new(arguments.count.into())));
    for number in 0..arguments.count {
        let mut address = arguments.listen;
        if address.port() != 0 {
            address.set_port(address.port() + number);
        }
        let (port, settings) = (Port::at(address)?, arguments.settings.clone());
        let mut worker = MockWorker::listen_in(port, settings, lockstep.clone()).await?;
        println!("{}", worker.url());
        workers.spawn(async move { worker.died().await });
    }
    workers.join_next().await;
    Ok(())
}
