//! `--worker-urls-file`: one worker URL a line, `#` begins a comment.

use std::{fs, io, path::PathBuf, time::Duration};

use tokio::{task::spawn_blocking, time::sleep};

use super::{Following, Found};
use crate::fleet::worker_url::WorkerUrl;

/// Looked at this often; a notification of the kernel's would not come over NFS or a mounted
/// ConfigMap.
const PERIOD: Duration = Duration::from_secs(1);

pub(super) struct UrlsFile {
    path: PathBuf,
    /// What was read at the last look, good or bad.
    seen: Option<Result<String, io::ErrorKind>>,
    /// It has been dealt with.
    settled: bool,
}

impl UrlsFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, seen: None, settled: false }
    }

    pub(super) async fn follow(mut self, mut following: Following) {
        loop {
            let path = self.path.clone();
            let read = spawn_blocking(move || fs::read_to_string(path)).await;
            if let Some(found) = read.ok().and_then(|read| self.look(read)) {
                following.update(found);
            }
            sleep(PERIOD).await;
        }
    }

    /// The new set of workers, if there is one. A file is believed when it reads the same twice: it
    /// may have been caught while it is written. The first time there is nothing to lose.
    fn look(&mut self, read: io::Result<String>) -> Option<Found> {
        let read = read.map_err(|error| error.kind());
        let first = self.seen.is_none();
        if self.seen.as_ref() != Some(&read) {
            self.seen = Some(read);
            self.settled = false;
            if !first {
                return None;
            }
        }
        if std::mem::replace(&mut self.settled, true) {
            return None;
        }
        let parsed = match self.seen.as_ref()? {
            Ok(text) => parse(text),
            Err(error) => Err(error.to_string()),
        };
        match parsed {
            Ok(found) => Some(found),
            Err(why) => {
                tracing::warn!("{}: {why}; the workers stay as they are", self.path.display());
                None
            }
        }
    }
}

fn parse(text: &str) -> Result<Found, String> {
    if text.is_empty() {
        return Err("empty; a comment line says that no workers are meant".to_owned());
    }
    let mut found = Found::new();
    for (index, line) in text.lines().enumerate() {
        let url = line.split('#').next().unwrap_or_default().trim();
        if !url.is_empty() {
            let url: WorkerUrl =
                url.parse().map_err(|error| format!("line {}: {error}", index + 1))?;
            found.insert(url, String::new());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(found: Option<Found>) -> Option<Vec<String>> {
        found.map(|found| found.into_keys().map(String::from).collect())
    }

    fn look(file: &mut UrlsFile, text: &str) -> Option<Vec<String>> {
        urls(file.look(Ok(text.to_owned())))
    }

    #[test]
    fn comments_blanks_and_repetitions_are_no_workers() {
        let text = "# ours\n\n http://b:1 # the old one\nhttp://a:1\r\nhttp://A:1/\n";
        let found = parse(text).expect("good");
        assert_eq!(urls(Some(found)), Some(vec!["http://a:1".into(), "http://b:1".into()]));
        assert_eq!(parse("# none\n"), Ok(Found::new()));
        assert!(parse("").is_err());
        let error = parse("http://a:1\nhttp://b:1/v1").expect_err("a path");
        assert!(error.contains("line 2") && error.contains("http://b:1/v1"), "{error}");
    }

    #[test]
    fn a_change_counts_when_it_has_settled() {
        let mut file = UrlsFile::new("workers".into());
        let one = Some(vec!["http://a:1".to_owned()]);
        assert_eq!(look(&mut file, "http://a:1"), one);
        assert_eq!(look(&mut file, "http://a:1"), None);
        // Truncated, written in two pieces, and then left alone.
        assert_eq!(look(&mut file, ""), None);
        assert_eq!(look(&mut file, "http://b:80"), None);
        assert_eq!(look(&mut file, "http://b:8000"), None);
        assert_eq!(look(&mut file, "http://b:8000"), Some(vec!["http://b:8000".to_owned()]));
        assert_eq!(look(&mut file, "http://b:8000"), None);
    }

    #[test]
    fn what_cannot_be_read_changes_nothing() {
        let mut file = UrlsFile::new("workers".into());
        assert!(look(&mut file, "http://a:1").is_some());
        for bad in ["", "", "http://", "http://"] {
            assert_eq!(look(&mut file, bad), None);
        }
        for _ in 0..3 {
            assert_eq!(urls(file.look(Err(io::ErrorKind::NotFound.into()))), None);
        }
        assert_eq!(look(&mut file, "http://a:1\nhttp://b:1"), None);
        assert!(look(&mut file, "http://a:1\nhttp://b:1").is_some());
    }
}
