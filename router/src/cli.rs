//! The `mla-router` command, for the binary and for `python -m mla_router.launch_router`.

use std::{
    ffi::OsString, fs, io, io::IsTerminal, process::ExitCode, sync::OnceLock, time::Duration,
};

use clap::Parser;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::{
    runtime::{self, Runtime},
    signal::unix::{Signal, SignalKind, signal},
};
use tracing_subscriber::{EnvFilter, fmt::writer::BoxMakeWriter};

use crate::{config::Config, handle, log_lines::LogLines, server::listen, telemetry::access_log};

/// The log lines of this process, once `init_logging` was called.
static LOG_LINES: OnceLock<LogLines> = OnceLock::new();

/// Time limit for writing the remaining log lines. A reader that has paused may never take them.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// Parses the arguments (the first one is the program name), runs the router until it stops, and returns the exit code.
pub fn main(argv: impl IntoIterator<Item = OsString>) -> ExitCode {
    let config = match Config::try_parse_from(argv) {
        Ok(config) => config,
        Err(error) => {
            // Help and version go to stdout, with exit code 0. A failure to write them cannot be reported.
            let _unread = error.print();
            return if error.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
        }
    };
    init_logging(&config);
    for (flag, why) in config.ignored.given() {
        tracing::warn!("{flag} has no effect here: {why}");
    }
    let served = threads().and_then(|threads| {
        let served = threads.block_on(serve(config));
        // Does not wait for a blocking read of a file, which may hang on a network file system.
        threads.shutdown_background();
        served
    });
    flush_log();
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The same prefix as in the messages of clap and of the launchers.
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Creates the runtime of a router, and raises the limit on open files to the hard limit. The usual limit of shells,
/// 1024, is too low for sockets.
pub fn threads() -> io::Result<Runtime> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, most, most) {
        tracing::warn!("cannot raise the limit on open files: {error}");
    }
    // One thread for everything except connections, which have threads of their own.
    runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("mla-router")
        .enable_all()
        .build()
}

/// Sends log lines to stderr, through a thread: see [`crate::log_lines`]. Only the first call has an effect.
pub fn init_logging(config: &Config) {
    let access = if config.access_log { "info" } else { "off" };
    let filter = format!("{},{}={access}", config.log_level.as_str(), access_log::TARGET);
    // Without a thread, lines are written by those that log.
    let writer = LogLines::to(io::stderr()).map_or_else(
        |_| BoxMakeWriter::new(io::stderr),
        |lines| BoxMakeWriter::new(LOG_LINES.get_or_init(|| lines).clone()),
    );
    let subscriber = tracing_subscriber::fmt()
        .with_writer(writer)
        .with_target(false)
        // An internal error would be written to stderr as well, and panic if stderr is full.
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal())
        .with_env_filter(EnvFilter::new(filter));
    // A program that embeds the router keeps its own logging.
    let _kept = if config.log_json {
        tracing::subscriber::set_global_default(subscriber.json().flatten_event(true).finish())
    } else {
        tracing::subscriber::set_global_default(subscriber.finish())
    };
}

/// Waits for the log lines so far to be written. A program that embeds the router may end at once then.
pub fn flush_log() {
    if let Some(lines) = LOG_LINES.get() {
        lines.flush(FLUSH_LIMIT);
    }
}

async fn serve(config: Config) -> io::Result<()> {
    let listener = listen::bind(&config).await.map_err(io::Error::other)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut again = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = hang_up()?;
    let drain = async {
        tokio::select! {
            () = received(&mut terminate) => {}
            () = async {
                match &mut hang_up {
                    Some(signal) => received(signal).await,
                    None => std::future::pending().await,
                }
            } => {}
        }
    };
    let stop = async {
        tokio::select! {
            () = received(&mut interrupt) => {}
            // A second SIGTERM ends the drain.
            () = async { received(&mut again).await; received(&mut again).await } => {}
        }
    };
    handle::run(listener, config, drain, stop).await.map_err(io::Error::other)
}

/// Returns SIGHUP, which a closed terminal sends, or `None` if it was ignored at the start, as by `nohup`.
fn hang_up() -> io::Result<Option<Signal>> {
    // A signal has bit N - 1 of this hexadecimal number. Without `/proc` SIGHUP is handled.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let kind = SignalKind::hangup();
    if ignored >> (kind.as_raw_value() - 1) & 1 == 1 { Ok(None) } else { signal(kind).map(Some) }
}

async fn received(signal: &mut Signal) {
    // `None` means that no further signal can come.
    if signal.recv().await.is_none() {
        std::future::pending::<()>().await;
    }
}
