//! The `mla-router` command as a process, and its log on stderr.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    process::{Output, Stdio},
};

use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStderr, Command},
};

use super::soon;

const BINARY: &str = env!("CARGO_BIN_EXE_mla-router");

/// A long limit: a correct process may be late on a busy machine.
const PATIENT: [&str; 2] = ["--health-check-timeout-secs", "3600"];

/// Runs a command to its end.
pub(crate) fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = std::process::Command::new(BINARY);
    command.args(arguments).envs(variables.iter().copied());
    command.output().expect("the binary runs")
}

/// The process. It is killed when the value is dropped.
pub(crate) struct Process {
    child: Child,
    /// `None` once the log is no longer read.
    log: Option<Lines<BufReader<ChildStderr>>>,
    /// Log lines before the address: a worker may be up before the router prints its address.
    early: VecDeque<String>,
}

impl Process {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[])
    }

    pub(crate) fn start_with(arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(BINARY);
        command.args(arguments).args(PATIENT).envs(variables.iter().copied());
        Self::spawn(command)
    }

    /// Starts the process in a shell, after the command `setup`.
    pub(crate) fn start_after(setup: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new("sh");
        let script = format!("{setup} && exec \"$0\" \"$@\"");
        command.args(["-c", &script, BINARY]).args(arguments).args(PATIENT);
        Self::spawn(command)
    }

    fn spawn(mut command: Command) -> Self {
        command.stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("the binary runs");
        let log = BufReader::new(child.stderr.take().expect("piped")).lines();
        Self { child, log: Some(log), early: VecDeque::new() }
    }

    /// Returns the next line of the log. `None` if the process has closed the log.
    pub(crate) async fn line(&mut self) -> Option<String> {
        if let Some(line) = self.early.pop_front() {
            return Some(line);
        }
        let log = self.log.as_mut().expect("it was not closed");
        soon(log.next_line()).await.expect("readable")
    }

    /// Closes the log: the process cannot write to it.
    pub(crate) fn close_log(&mut self) {
        self.log = None;
    }

    /// Returns the next line with `word`.
    pub(crate) async fn line_with(&mut self, word: &str) -> String {
        loop {
            let line = self.line().await.unwrap_or_else(|| panic!("no line with {word:?}"));
            if line.contains(word) {
                return line;
            }
        }
    }

    /// Returns the address of the listener from the log.
    pub(crate) async fn address(&mut self) -> SocketAddr {
        let mut early = VecDeque::new();
        let line = loop {
            let line = self.line().await.expect("a line with the address");
            if line.contains("listening on http") {
                break line;
            }
            early.push_back(line);
        };
        self.early = early;
        let address = line.split("://").nth(1).and_then(|rest| rest.split(',').next());
        address.expect("an address").parse().expect("a socket address")
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id().expect("running")
    }

    pub(crate) fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends a signal, by its name without SIG.
    pub(crate) fn signal(&self, name: &str) {
        let (name, id) = (format!("-{name}"), self.id().to_string());
        let sent = std::process::Command::new("kill").args([name, id]).status();
        assert!(sent.expect("kill exists").success());
    }

    /// Waits for the exit status.
    pub(crate) async fn exit_code(&mut self) -> Option<i32> {
        soon(self.child.wait()).await.expect("it ends").code()
    }
}
