//! A running router in the hands of the program that started it: the CLI, the Python bindings, tests.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    net::TcpListener,
    sync::watch,
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::{
    config::Config,
    cores::Cores,
    discovery::Sources,
    error::{Error, StartError},
    fleet::worker::WorkerView,
    names::WorkerUrl,
    policy::{self, Policy},
    router::Router,
    server::{self, connection::Course, tls::Tls},
    stats::Stats,
    upstream::address::WorkerAddress,
};

/// With `--reuse-port`, from closing the port to refusing requests: for those who had connected and
/// not yet asked.
const HAND_OVER: Duration = Duration::from_millis(200);

/// After the grace period, time to close what is still open.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// For the error events of streams that are cut off, and the refusals of requests.
const FAREWELL: Duration = Duration::from_millis(250);

/// For the last traces to reach their collector.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// Dropping the handle ends the router at once. Its methods may be called from any thread.
pub struct RouterHandle {
    router: Arc<Router>,
    local_addr: SocketAddr,
    /// What the connections follow.
    course: watch::Sender<Course>,
    /// Closes when the server task has ended, however it did.
    running: watch::Receiver<()>,
    server: AbortHandle,
    /// What follows files and clusters. Ends with the handle.
    following: Mutex<JoinSet<()>>,
}

impl RouterHandle {
    /// Listens where the config says and serves until stopped. Returns when the port is bound.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let policy = policy::of(&config);
        Self::start_with_policy(config, policy).await
    }

    /// The same with a policy of the caller's instead of the config's.
    pub async fn start_with_policy(
        config: Config,
        policy: Box<dyn Policy>,
    ) -> Result<Self, StartError> {
        let listener = server::listen::bind(&config).await?;
        Self::run_on(listener, config, policy, Some(Cores::start()?)).await
    }

    /// Serves on a listener of the caller's.
    pub async fn serve(listener: TcpListener, config: Config) -> Result<Self, StartError> {
        Self::serve_on(listener, config, None).await
    }

    /// The same, with the connections on threads of their own.
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
        let (course, followed) = watch::channel(Course::Serving);
        let (alive, running) = watch::channel(());
        let accepting = server::listen::accept(listener, tls, Arc::clone(&router), followed, cores);
        let server = tokio::spawn(async move {
            accepting.await;
            drop(alive);
        })
        .abort_handle();
        let following = Mutex::new(following);
        Ok(Self { router, local_addr, course, running, server, following })
    }

    /// Where it listens: the port is the real one, also when the config says 0.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Registers a worker; it takes requests after its first good health check.
    pub fn add_worker(&self, url: &str) -> Result<WorkerView, Error> {
        Ok(self.router.add_worker(WorkerAddress::trusted(WorkerUrl::from_client(url)?))?.view())
    }

    /// Takes a worker out of rotation for good; it may finish what it is serving.
    pub fn remove_worker(&self, url: &str) -> Result<(), Error> {
        self.router.remove_worker(&WorkerUrl::from_client(url)?)
    }

    pub fn workers(&self) -> Vec<WorkerView> {
        self.router.registry.views()
    }

    /// What the router knows now, in one piece.
    pub fn stats(&self) -> Stats {
        self.router.stats()
    }

    /// Not ready any more, no new requests; true when those in flight have finished within `grace`.
    /// The port stays open, so that probes can read that it is draining.
    pub async fn drain(&self, grace: Duration) -> bool {
        if self.router.config.reuse_port {
            self.steer(Course::HandingOver);
            sleep(HAND_OVER).await;
        }
        self.router.gate.close();
        self.steer(Course::Draining);
        let in_flight = self.router.gate.in_flight();
        tracing::info!("draining: {in_flight} requests in flight, at most {grace:?}");
        self.router.gate.drain(grace).await
    }

    /// Stops accepting and closes the connections; those that answer a request now get until
    /// `grace` has passed. Then streams that still run end with an error event, and requests without an
    /// answer with a 503. Returns when all is closed.
    pub async fn stop(&self, grace: Duration) {
        let deadline = Instant::now() + grace;
        self.router.gate.close();
        self.steer(Course::Stopping(deadline + FAREWELL));
        self.following.lock().abort_all();
        if timeout_at(deadline, self.wait()).await.is_err() {
            self.router.gate.cut();
            // The same again, so that the connections look at their streams.
            self.steer(Course::Stopping(deadline + FAREWELL));
            self.wait().await;
        }
        if let Some(tracer) = &self.router.tracer {
            // What the collector does not take by then is lost.
            let _late = timeout(FLUSH_LIMIT, tracer.flush()).await;
        }
        self.router.retire();
        tracing::info!("stopped");
    }

    /// Never back: who stops does not drain any more.
    fn steer(&self, to: Course) {
        self.course.send_if_modified(|course| {
            let goes_on =
                !matches!(course, Course::Stopping(_)) || matches!(to, Course::Stopping(_));
            if goes_on {
                *course = to;
            }
            goes_on
        });
    }

    /// Resolves when the router has stopped.
    pub async fn wait(&self) {
        // Nothing is ever sent: an error is the other end being dropped, which is what we wait for.
        let _closed = self.running.clone().changed().await;
    }

    /// What the router counts and knows; for tests and metrics.
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

/// The one line that says what runs where.
fn announce(router: &Router, address: SocketAddr) {
    let policy = router.policy.name();
    let workers: Vec<String> =
        router.registry.workers().iter().map(|worker| worker.url.to_string()).collect();
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
