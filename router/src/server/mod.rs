//! Towards clients: accepts connections, sees that what comes over them is one honest request at a
//! time from somebody who may send it, and takes them down in order.
//!
//! [`listen`] accepts; each connection is a task of [`connection`], where hyper reads through a
//! [`guard`] that judges each head by [`head`]. [`auth`] decides who may ask what.

mod answer;
mod auth;
pub(crate) mod connection;
mod guard;
mod head;
pub mod listen;
pub mod request_id;
pub(crate) mod tls;
pub mod turn;

use std::time::Duration;

use tokio::net::TcpListener;

use crate::{config::Config, cores::Cores, error::StartError, handle::RouterHandle};

/// After the grace period, time to close what is still open.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Runs a router until it has come down: `drain` lets the requests in flight finish within the grace
/// period, `stop` ends them at once, also during a drain. The caller owns listener and signals.
pub async fn run(
    listener: TcpListener,
    config: Config,
    drain: impl Future<Output = ()>,
    stop: impl Future<Output = ()>,
) -> Result<(), StartError> {
    let grace = config.shutdown_grace_period_secs.get();
    let handle = RouterHandle::serve_on(listener, config, Some(Cores::start()?)).await?;
    let drained = async {
        drain.await;
        handle.drain(grace).await
    };
    tokio::select! {
        _ = drained => {}
        () = stop => {}
    }
    handle.stop(LAST_WORDS).await;
    Ok(())
}
