//! The `mla-router` command as a process, and what it says on stderr.

use std::{net::SocketAddr, process::Stdio};

use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStderr, Command},
};

use super::soon;

/// Killed when it is dropped.
pub(crate) struct Process {
    child: Child,
    log: Lines<BufReader<ChildStderr>>,
}

impl Process {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, |_| {})
    }

    pub(crate) fn start_with(arguments: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mla-router"));
        command.args(arguments).stderr(Stdio::piped()).kill_on_drop(true);
        change(&mut command);
        let mut child = command.spawn().expect("the binary runs");
        let log = BufReader::new(child.stderr.take().expect("piped")).lines();
        Self { child, log }
    }

    /// The next line of the log, or none when the process has closed it.
    pub(crate) async fn line(&mut self) -> Option<String> {
        soon(self.log.next_line()).await.expect("readable")
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
        let line = self.line_with("listening on http").await;
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
