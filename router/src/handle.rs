//! A running router as a library: for the CLI, the Python bindings, and tests.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{
    net::TcpListener,
    sync::watch,
    task::{AbortHandle, JoinSet},
    time::{sleep, timeout},
};

use crate::{
    config::Config,
    cores::Cores,
    discovery::Sources,
    error::{Error, StartError},
    fleet::{WorkerView, registry::backends},
    names::WorkerUrl,
    policy::{self, Policy},
    router::Router,
    server::{self, connection::Lifecycle, tls::Tls},
    stats::Stats,
};

/// With `--reuse-port`, the time without requests after which they are refused. Until then each open connection may have
/// another one.
const HANDOVER_TIME: Duration = Duration::from_millis(200);

/// Time to close the open connections after the grace period.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Time to send the error events of interrupted streams, and the errors of waiting requests. It counts from the
/// interruption, so a router that gets no CPU for a while still sends them. Only clients that do not read need all of it.
const ERROR_EVENT_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit for sending the remaining traces.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// The handle of a running router. Dropping it ends the router at once. All methods may be called from any thread.
pub struct RouterHandle {
    router: Arc<Router>,
    local_addr: SocketAddr,
    /// The lifecycle, which the connections follow.
    lifecycle: watch::Sender<Lifecycle>,
    /// Closes when the server task has ended.
    running: watch::Receiver<()>,
    server: AbortHandle,
    /// Tasks that follow files and clusters. They end with the handle.
    following: Mutex<JoinSet<()>>,
}

impl RouterHandle {
    /// Starts a router. Returns when the port is bound. Fails if it cannot start.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let policy = policy::of(&config);
        Self::start_with_policy(config, policy).await
    }

    /// Starts a router with `policy` instead of the policy of the config.
    pub async fn start_with_policy(
        config: Config,
        policy: Box<dyn Policy>,
    ) -> Result<Self, StartError> {
        let listener = server::listen::bind(&config).await?;
        Self::run_on(listener, config, policy, Some(Cores::start()?)).await
    }

    /// Starts a router on an open listener.
    pub async fn serve(listener: TcpListener, config: Config) -> Result<Self, StartError> {
        Self::serve_on(listener, config, None).await
    }

    /// Starts a router on an open listener, with its connections on the threads of `cores`.
    pub async fn serve_on(
        listener: TcpListener,
        config: Config,
        cores: Option<Cores>,
    ) -> Result<Self, StartError> {
        let policy = policy::of(&config);
        Self::run_on(listener, config, policy, cores).await
    }

    async fn run_on(
        listener: TcpListener,
        config: Config,
        policy: Box<dyn Policy>,
        cores: Option<Cores>,
    ) -> Result<Self, StartError> {
        let local_addr = listener.local_addr()?;
        let tls = Tls::start(&config)?;
        let sources = Sources::prepare(&config).await?;
        let router = Router::with_policy(config, policy)?;
        let mut following = sources.follow(&router);
        let tls = tls.map(|(tls, renewal)| {
            following.spawn(renewal);
            tls
        });
        announce(&router, local_addr);
        let (lifecycle, followed) = watch::channel(Lifecycle::Serving);
        let (alive, running) = watch::channel(());
        let accepting = server::listen::accept(listener, tls, Arc::clone(&router), followed, cores);
        let server = tokio::spawn(async move {
            accepting.await;
            drop(alive);
        })
        .abort_handle();
        let following = Mutex::new(following);
        Ok(Self { router, local_addr, lifecycle, running, server, following })
    }

    /// The address of the listener. The port is the actual one, also if the config has port 0.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Registers a worker. It takes requests after its first good health check.
    pub fn add_worker(&self, url: &str) -> Result<WorkerView, Error> {
        Ok(self.router.add_worker(WorkerUrl::from_client(url)?.into())?.view())
    }

    /// Removes a worker. Its requests in flight finish.
    pub fn remove_worker(&self, url: &str) -> Result<(), Error> {
        self.router.remove_worker(&WorkerUrl::from_client(url)?)
    }

    pub fn workers(&self) -> Vec<WorkerView> {
        self.router.registry.views()
    }

    /// A snapshot of the statistics.
    pub fn stats(&self) -> Stats {
        self.router.stats()
    }

    /// Refuses new requests and waits for the ones in flight. Returns whether all have finished within `grace`. The
    /// port stays open, so that probes can read the state. With `--reuse-port` it is closed, and refusals begin last.
    pub async fn drain(&self, grace: Duration) -> bool {
        let (gate, begun) = (&self.router.gate, Instant::now());
        if self.router.config.reuse_port {
            self.set_lifecycle(Lifecycle::HandingOver);
            let in_flight = gate.in_flight();
            tracing::info!("handing over: {in_flight} requests in flight, at most {grace:.0?}");
            let _late = timeout(grace, self.until_quiet()).await;
        }
        gate.close();
        self.set_lifecycle(Lifecycle::Draining);
        let left = grace.saturating_sub(begun.elapsed());
        tracing::info!("draining: {} requests in flight, at most {left:.0?}", gate.in_flight());
        gate.drain(left).await
    }

    /// Waits for two moments without a request in flight, HANDOVER_TIME apart.
    async fn until_quiet(&self) {
        let mut was_empty = false;
        loop {
            let is_empty = self.router.gate.in_flight() == 0;
            if is_empty && was_empty {
                return;
            }
            was_empty = is_empty;
            sleep(HANDOVER_TIME).await;
        }
    }

    /// Closes the port and the connections. Requests in flight have `grace` to finish. Then streams end with an
    /// error event, and requests without a response with 503. Returns when all connections are closed.
    pub async fn stop(&self, grace: Duration) {
        self.router.gate.close();
        self.set_lifecycle(Lifecycle::Stopping);
        self.following.lock().abort_all();
        if timeout(grace, self.wait()).await.is_err() {
            self.router.gate.cut();
            // Sent again, so that the connections poll their streams.
            self.set_lifecycle(Lifecycle::Stopping);
            if timeout(ERROR_EVENT_TIMEOUT, self.wait()).await.is_err() {
                tracing::warn!("closing the connections that did not end in time");
                self.server.abort();
                self.wait().await;
            }
        }
        if let Some(tracer) = &self.router.tracer {
            // Traces that the collector has not taken by then are lost.
            let _late = timeout(FLUSH_LIMIT, tracer.flush()).await;
        }
        self.router.retire();
        tracing::info!("stopped");
    }

    /// Sets the lifecycle. A router that is stopping does not go back to draining.
    fn set_lifecycle(&self, to: Lifecycle) {
        self.lifecycle.send_if_modified(|lifecycle| {
            let goes_on = *lifecycle != Lifecycle::Stopping || to == Lifecycle::Stopping;
            if goes_on {
                *lifecycle = to;
            }
            goes_on
        });
    }

    /// Resolves when the router has stopped.
    pub async fn wait(&self) {
        // Nothing is ever sent. An error means that the sender was dropped, which is the awaited event.
        let _closed = self.running.clone().changed().await;
    }

    /// The state of the router, for tests and metrics.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }
}

impl Drop for RouterHandle {
    fn drop(&mut self) {
        self.server.abort();
        self.router.retire();
    }
}

/// Runs a router until it has stopped. When `drain` resolves, the requests in flight may finish within the grace
/// period. When `stop` resolves, they end at once, also during a drain.
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
    handle.stop(CLOSE_TIMEOUT).await;
    Ok(())
}

/// Logs address, policy and workers in one line.
fn announce(router: &Router, address: SocketAddr) {
    let policy = router.policy.name();
    let workers: Vec<String> =
        backends(&router.registry.replicas()).map(|backend| backend.url.to_string()).collect();
    let workers = match workers.len() {
        0 => "no workers yet".to_owned(),
        1 => format!("1 worker: {}", workers[0]),
        count => format!("{count} workers: {}", workers.join(" ")),
    };
    let scheme = if router.config.tls_cert_path.is_some() { "https" } else { "http" };
    let replay = if router.config.disable_replay || router.config.replay_key.is_some() {
        ""
    } else {
        "; broken streams are not continued: set MLA_ROUTER_REPLAY_KEY for router and workers"
    };
    tracing::info!("listening on {scheme}://{address}, policy {policy}, {workers}{replay}");
}
