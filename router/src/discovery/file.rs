//! `--worker-urls-file`: one worker URL a line; `#` starts a comment.

use std::{fs, io, path::PathBuf, pin::Pin};

use super::{
    Discovery,
    follower::{Follower, WorkerSet, WorkerSpec},
};
use crate::{file_watch::DebouncedFileWatch, names::WorkerUrl};

/// The file with the URLs of the workers.
pub(super) struct UrlsFile {
    path: PathBuf,
}

impl UrlsFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    async fn watch(self, mut follower: Follower) {
        let path = self.path.clone();
        let read = move || fs::read_to_string(&path).map_err(|error| error.kind());
        DebouncedFileWatch::new()
            .follow(read, |read| match found(read) {
                Ok(found) => follower.update(found),
                Err(why) => {
                    let path = self.path.display();
                    tracing::warn!("{path}: {why}; the workers stay as they are");
                }
            })
            .await;
    }
}

impl Discovery for UrlsFile {
    fn name(&self) -> &'static str {
        "file"
    }

    fn follow(self: Box<Self>, follower: Follower) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.watch(follower))
    }
}

/// Returns the workers in the file, or why it cannot be used.
fn found(read: &Result<String, io::ErrorKind>) -> Result<WorkerSet, String> {
    read.as_ref().map_err(io::ErrorKind::to_string).and_then(|text| parse(text))
}

fn parse(text: &str) -> Result<WorkerSet, String> {
    if text.is_empty() {
        return Err("the file is empty; a comment line in it would mean that there are no workers"
            .to_owned());
    }
    let mut found = WorkerSet::new();
    for (index, line) in text.lines().enumerate() {
        let url = line.split('#').next().unwrap_or_default().trim();
        if !url.is_empty() {
            let url: WorkerUrl =
                url.parse().map_err(|error| format!("line {}: {error}", index + 1))?;
            found.insert(url, WorkerSpec { instance: String::new(), ready: true });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(found: WorkerSet) -> Vec<String> {
        found.into_keys().map(String::from).collect()
    }

    #[test]
    fn comments_blanks_and_repetitions_are_no_workers() {
        let text = "# ours\n\n http://b:1 # the old one\nhttp://a:1\r\nhttp://A:1/\n";
        let found = parse(text).expect("good");
        assert_eq!(urls(found), ["http://a:1", "http://b:1"]);
        assert_eq!(parse("# none\n"), Ok(WorkerSet::new()));
        assert!(parse("").is_err());
        let error = parse("http://a:1\nhttp://b:1/v1").expect_err("a path");
        assert!(error.contains("line 2") && error.contains("http://b:1/v1"), "{error}");
    }

    #[test]
    fn an_unreadable_file_is_an_error_and_no_empty_set() {
        for bad in ["", "http://", "http://a:1\nb"] {
            assert!(found(&Ok(bad.to_owned())).is_err(), "{bad:?}");
        }
        assert!(found(&Err(io::ErrorKind::NotFound)).is_err());
    }
}
