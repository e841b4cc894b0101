//! `--worker-urls-file`: one worker URL a line, `#` begins a comment.

use std::{fs, io, path::PathBuf};

use super::{Following, Found, Told};
use crate::{names::WorkerUrl, settled::Settled};

pub(super) struct UrlsFile {
    path: PathBuf,
}

impl UrlsFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    pub(super) async fn follow(self, mut following: Following) {
        let path = self.path.clone();
        let read = move || fs::read_to_string(&path).map_err(|error| error.kind());
        Settled::new()
            .follow(read, |read| match found(read) {
                Ok(found) => following.update(found),
                Err(why) => {
                    let path = self.path.display();
                    tracing::warn!("{path}: {why}; the workers stay as they are");
                }
            })
            .await;
    }
}

/// The workers that the file names.
fn found(read: &Result<String, io::ErrorKind>) -> Result<Found, String> {
    read.as_ref().map_err(io::ErrorKind::to_string).and_then(|text| parse(text))
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
            found.insert(url, Told { who: String::new(), ready: true });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(found: Found) -> Vec<String> {
        found.into_keys().map(String::from).collect()
    }

    #[test]
    fn comments_blanks_and_repetitions_are_no_workers() {
        let text = "# ours\n\n http://b:1 # the old one\nhttp://a:1\r\nhttp://A:1/\n";
        let found = parse(text).expect("good");
        assert_eq!(urls(found), ["http://a:1", "http://b:1"]);
        assert_eq!(parse("# none\n"), Ok(Found::new()));
        assert!(parse("").is_err());
        let error = parse("http://a:1\nhttp://b:1/v1").expect_err("a path");
        assert!(error.contains("line 2") && error.contains("http://b:1/v1"), "{error}");
    }

    #[test]
    fn what_cannot_be_read_is_no_set_of_workers() {
        for bad in ["", "http://", "http://a:1\nb"] {
            assert!(found(&Ok(bad.to_owned())).is_err(), "{bad:?}");
        }
        assert!(found(&Err(io::ErrorKind::NotFound)).is_err());
    }
}
