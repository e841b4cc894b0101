//! `--worker-urls-file`: one worker a line, as a URL or as a JSON object; `#` starts a comment.

use std::{
    path::{Path, PathBuf},
    pin::Pin,
};

use super::{
    Discovery,
    follower::{Follower, Listed, WorkerSet},
};
use crate::{file, file_watch::DebouncedFileWatch, fleet::WorkerSpec, names::WorkerUrl};

/// The file with the URLs of the workers.
pub(super) struct UrlsFile {
    path: PathBuf,
}

impl UrlsFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    async fn watch(self, follower: Follower) {
        let path = self.path.clone();
        let read = move || read(&path);
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

/// Returns the text of the file, or why it cannot be read.
fn read(path: &Path) -> Result<String, String> {
    let content = file::read(path).map_err(|error| error.to_string())?;
    String::from_utf8(content).map_err(|error| error.to_string())
}

/// Returns the workers in the file, or why it cannot be used.
fn found(read: &Result<String, String>) -> Result<WorkerSet, String> {
    read.as_ref().map_err(String::clone).and_then(|text| parse(text))
}

fn parse(text: &str) -> Result<WorkerSet, String> {
    if text.is_empty() {
        return Err("the file is empty; a comment line in it would mean that there are no workers"
            .to_owned());
    }
    let mut found = WorkerSet::new();
    for (index, line) in text.lines().enumerate() {
        let spec = parse_line(line).map_err(|error| format!("line {}: {error}", index + 1))?;
        if let Some(spec) = spec {
            let listed = Listed { spec, instance: String::new(), ready: true };
            found.insert(listed.spec.url.clone(), listed);
        }
    }
    Ok(found)
}

fn parse_line(line: &str) -> Result<Option<WorkerSpec>, String> {
    if line.trim_start().starts_with('{') {
        return serde_json::from_str(line).map(Some).map_err(|error| error.to_string());
    }
    let url = line.split('#').next().unwrap_or_default().trim();
    if url.is_empty() {
        return Ok(None);
    }
    url.parse().map(|url: WorkerUrl| Some(url.into()))
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
    fn a_json_line_has_the_key_of_its_worker() {
        let found =
            parse("{\"url\": \"http://a:1\", \"api_key\": \"a#1\"}\nhttp://b:1").expect("good");
        let keys: Vec<_> = found.values().map(|listed| listed.spec.api_key.clone()).collect();
        assert_eq!(keys, [Some("a#1".parse().expect("a key")), None]);
        for bad in
            [r#"{"url":"http://a:1","weight":2}"#, r#"{"url":"http://a:1","api_key":""}"#, "{}"]
        {
            let error = parse(bad).expect_err(bad);
            assert!(error.starts_with("line 1: "), "{error}");
        }
    }

    #[test]
    fn an_unreadable_file_is_an_error_and_no_empty_set() {
        for bad in ["", "http://", "http://a:1\nb"] {
            assert!(found(&Ok(bad.to_owned())).is_err(), "{bad:?}");
        }
        assert!(found(&Err("not found".to_owned())).is_err());
    }
}
