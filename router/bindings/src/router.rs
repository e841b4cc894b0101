//! `Router`: a running router as a Python object, with threads of its own.

use std::{mem, pin::pin, sync::Arc, time::Duration};

use mla_allocator::Returning;
use mla_router::{Config, Error, RouterHandle, cli};
use parking_lot::Mutex;
use pyo3::{exceptions::PyValueError, prelude::*};
use tokio::{runtime::Runtime, time::timeout};

use crate::{RouterError, config::RouterConfig};

/// Longest delay of a Ctrl-C while Python waits for the router.
const SIGNAL_CHECK: Duration = Duration::from_millis(50);

/// Time for the threads to end after the router has stopped. Only a name look-up can delay one.
const JOIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A router within this process. `start` and `stop` it, or use it as a context manager.
#[pyclass(frozen, module = "mla_router")]
pub(crate) struct Router {
    config: Config,
    /// Locked for short times only, so that any thread may call any method while others wait.
    state: Mutex<State>,
}

#[derive(Default)]
enum State {
    #[default]
    Stopped,
    /// A thread is starting the router.
    Starting,
    Running(Arc<Running>),
}

/// A running router. It lives until the last call that uses it has returned, also if another thread stops the router.
struct Running {
    handle: RouterHandle,
    /// The process with the threads. A child that it forks has none of them, and would wait for them without end.
    process: u32,
    /// `None` only during the drop.
    runtime: Option<Runtime>,
    _returning: Returning,
}

impl Running {
    fn start(config: Config) -> Result<Self, String> {
        let no_threads = |error| format!("cannot start threads: {error}");
        let runtime = cli::threads().map_err(no_threads)?;
        let returning = Returning::start().map_err(no_threads)?;
        let handle = runtime.block_on(RouterHandle::start(config));
        let handle = handle.map_err(|error| error.to_string())?;
        let process = std::process::id();
        Ok(Self { handle, process, runtime: Some(runtime), _returning: returning })
    }

    /// Whether this is a forked child of the process of the router.
    fn is_elsewhere(&self) -> bool {
        self.process != std::process::id()
    }

    /// Waits for `future` without holding the interpreter, and lets Ctrl-C end the wait.
    fn wait_for<T: Send>(
        &self,
        py: Python<'_>,
        future: impl Future<Output = T> + Send,
    ) -> PyResult<T> {
        let runtime = self.runtime.as_ref().expect("contract: not being dropped");
        let mut future = pin!(future);
        loop {
            let turn = async { timeout(SIGNAL_CHECK, future.as_mut()).await };
            match py.detach(|| runtime.block_on(turn)) {
                Ok(value) => return Ok(value),
                Err(_) => py.check_signals()?,
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if self.is_elsewhere() {
            // Its files are those of the parent, which still uses them.
            mem::forget(runtime);
        } else {
            runtime.shutdown_timeout(JOIN_TIMEOUT);
        }
    }
}

#[pymethods]
impl Router {
    #[new]
    #[pyo3(signature = (config = None))]
    fn new(config: Option<&Bound<'_, RouterConfig>>) -> Self {
        let config = config.map_or_else(Config::default, |config| config.get().config.clone());
        Self { config, state: Mutex::default() }
    }

    /// Starts the router. Returns when the port is open. Raises RouterError if the port is in use.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        match &mut *self.state.lock() {
            state @ State::Stopped => *state = State::Starting,
            _ => return Err(RouterError::new_err("the router is already running")),
        }
        cli::init_logging(&self.config);
        let (state, outcome) = match py.detach(|| Running::start(self.config.clone())) {
            Ok(running) => (State::Running(Arc::new(running)), Ok(())),
            Err(message) => (State::Stopped, Err(RouterError::new_err(message))),
        };
        *self.state.lock() = state;
        outcome
    }

    /// The URL at which the router listens.
    #[getter]
    fn url(&self) -> PyResult<String> {
        let scheme = if self.config.tls_cert_path.is_some() { "https" } else { "http" };
        Ok(format!("{scheme}://{}", self.running()?.handle.local_addr()))
    }

    /// Registers a worker. It gets requests after its first good health check.
    fn add_worker(&self, url: &str) -> PyResult<()> {
        self.running()?.handle.add_worker(url).map(drop).map_err(|error| refused(&error))
    }

    /// Removes a worker. Its requests in flight may finish.
    fn remove_worker(&self, url: &str) -> PyResult<()> {
        self.running()?.handle.remove_worker(url).map_err(|error| refused(&error))
    }

    /// The workers and their state, in the order of registration.
    fn workers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(pythonize::pythonize(py, &self.running()?.handle.workers())?)
    }

    /// Returns all statistics of the router.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let running = self.running()?;
        Ok(pythonize::pythonize(py, &py.detach(|| running.handle.stats()))?)
    }

    /// Refuses new requests. Returns whether the requests in flight have finished in time.
    fn drain(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let grace = seconds(timeout_s)?;
        let running = self.running()?;
        running.wait_for(py, running.handle.drain(grace))
    }

    /// Closes the port and, after `timeout_s`, the connections. Does nothing if it is not running in this process.
    #[pyo3(signature = (timeout_s = 5.0))]
    fn stop(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let grace = seconds(timeout_s)?;
        let Some(running) = self.take_running() else { return Ok(()) };
        let stopped = running.wait_for(py, running.handle.stop(grace));
        py.detach(|| {
            drop(running);
            cli::flush_log();
        });
        stopped
    }

    /// Returns when the router has been stopped. Ctrl-C ends the wait, not the router.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.running()?;
        running.wait_for(py, running.handle.wait())
    }

    fn __enter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, Self>> {
        slf.get().start(slf.py())?;
        Ok(slf.clone())
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyAny>) -> PyResult<()> {
        self.stop(py, 5.0)
    }

    fn __repr__(&self) -> String {
        match self.url() {
            Ok(url) => format!("<Router on {url}>"),
            Err(_) => "<Router, not running>".to_owned(),
        }
    }
}

impl Router {
    fn take_running(&self) -> Option<Arc<Running>> {
        let mut state = self.state.lock();
        let State::Running(running) = &*state else { return None };
        if running.is_elsewhere() {
            return None;
        }
        let running = Arc::clone(running);
        *state = State::Stopped;
        Some(running)
    }

    fn running(&self) -> PyResult<Arc<Running>> {
        match &*self.state.lock() {
            State::Running(running) if running.is_elsewhere() => {
                let (parent, this) = (running.process, std::process::id());
                Err(RouterError::new_err(format!(
                    "the router runs in process {parent}, from which process {this} was forked"
                )))
            }
            State::Running(running) => Ok(Arc::clone(running)),
            _ => Err(RouterError::new_err("the router is not running")),
        }
    }
}

fn refused(error: &Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::BadRequest { .. } => PyValueError::new_err(message),
        _ => RouterError::new_err(message),
    }
}

fn seconds(timeout_s: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(timeout_s).map_err(|_| {
        PyValueError::new_err(format!(
            "timeout_s must be a finite number of seconds from 0 on, not {timeout_s}"
        ))
    })
}
