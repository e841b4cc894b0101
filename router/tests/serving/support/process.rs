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

/// An honest worker may be late because the machine has much else to do.
const PATIENT: [&str; 2] = ["--health-check-timeout-secs", "3600"];

/// The whole run of a command that ends by itself.
pub(crate) fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = std::process::Command::new(BINARY);
    command.args(arguments).envs(variables.iter().copied());
    command.output().expect("the binary runs")
}

/// Killed when it is dropped.
pub(crate) struct Process {
    child: Child,
    /// `None` once the log is no longer read.
    log: Option<Lines<BufReader<ChildStderr>>>,
    /// What was read while the address was looked for: a worker may be up before it is told.
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

    /// With a limit on its open files.
    pub(crate) fn start_with_files(limit: u32, arguments: &[&str]) -> Self {
        let mut command = Command::new("sh");
        let script = format!("ulimit -n {limit} && exec \"$0\" \"$@\"");
        command.args(["-c", &script, BINARY]).args(arguments).args(PATIENT);
        Self::spawn(command)
    }

    fn spawn(mut command: Command) -> Self {
        command.stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("the binary runs");
        let log = BufReader::new(child.stderr.take().expect("piped")).lines();
        Self { child, log: Some(log), early: VecDeque::new() }
    }

    /// The next line of the log, or none when the process has closed it.
    pub(crate) async fn line(&mut self) -> Option<String> {
        if let Some(line) = self.early.pop_front() {
            return Some(line);
        }
        let log = self.log.as_mut().expect("it was not closed");
        soon(log.next_line()).await.expect("readable")
    }

    /// From now on the process cannot write its log.
    pub(crate) fn close_log(&mut self) {
        self.log = None;
    }

    /// The next line that says `word`.
    pub(crate) async fn line_with(&mut self, word: &str) -> String {
        loop {
            let line = self.line().await.unwrap_or_else(|| panic!("no line with {word:?}"));
            if line.contains(word) {
                return line;
            }
        }
    }

    /// Where it listens, as its log says.
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

    /// By name, without the SIG.
    pub(crate) fn signal(&self, name: &str) {
        let (name, id) = (format!("-{name}"), self.id().to_string());
        let sent = std::process::Command::new("kill").args([name, id]).status();
        assert!(sent.expect("kill exists").success());
    }

    /// The exit status, when it comes.
    pub(crate) async fn exit_code(&mut self) -> Option<i32> {
        soon(self.child.wait()).await.expect("it ends").code()
    }
}
