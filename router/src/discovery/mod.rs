//! Where workers come from besides the command line and the admin routes: sources that say at any
//! time which workers there should be. To add one: a file here, and a few lines in [`Sources`].

mod file;
#[cfg(feature = "kubernetes")]
mod kubernetes;

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, Weak},
};

use tokio::task::JoinSet;

use crate::{
    config::Config, error::StartError, names::WorkerUrl, router::Router,
    upstream::address::WorkerAddress,
};

/// The sources that the config names, checked as far as they can be before the router runs.
pub(crate) struct Sources {
    file: Option<file::UrlsFile>,
    #[cfg(feature = "kubernetes")]
    pods: Option<kubernetes::Pods>,
}

impl Sources {
    #[cfg_attr(
        not(feature = "kubernetes"),
        expect(clippy::unused_async, reason = "looking for a cluster takes time")
    )]
    pub(crate) async fn prepare(config: &Config) -> Result<Self, StartError> {
        #[cfg(not(feature = "kubernetes"))]
        if config.service_discovery {
            let why = "this build has no Kubernetes; build it with the feature `kubernetes`";
            return Err(StartError::Discovery(format!("--service-discovery: {why}")));
        }
        Ok(Self {
            file: config.worker_urls_file.clone().map(file::UrlsFile::new),
            #[cfg(feature = "kubernetes")]
            pods: if config.service_discovery {
                Some(kubernetes::Pods::prepare(config).await?)
            } else {
                None
            },
        })
    }

    /// Follows the sources until the tasks are dropped or the router is gone.
    pub(crate) fn follow(self, router: &Arc<Router>) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        if let Some(file) = self.file {
            tasks.spawn(file.follow(Following::new(router, "file")));
        }
        #[cfg(feature = "kubernetes")]
        if let Some(pods) = self.pods {
            tasks.spawn(pods.follow(Following::new(router, "Kubernetes")));
        }
        tasks
    }
}

/// The workers that should be.
type Found = BTreeMap<WorkerUrl, Told>;

/// A word of a source on one worker.
#[derive(Clone, Debug, PartialEq)]
struct Told {
    /// What tells it from another one that has its URL later: the next pod may get the address of the last.
    who: String,
    /// Whether it should get requests. One that should not, for now, stays known with all that was learned.
    ready: bool,
}

/// Brings the router in accord with what a source says. Workers that others have added are theirs:
/// they are not removed, and who takes out one of ours has the last word until it goes and comes.
struct Following {
    router: Weak<Router>,
    source: &'static str,
    ours: Found,
}

impl Following {
    fn new(router: &Arc<Router>, source: &'static str) -> Self {
        Self { router: Arc::downgrade(router), source, ours: Found::new() }
    }

    /// What was in the set and is no more goes, and may finish what it is serving; what is new comes.
    fn update(&mut self, found: Found) {
        let Some(router) = self.router.upgrade() else {
            return;
        };
        let source = self.source;
        let before = mem::take(&mut self.ours);
        for (url, told) in &before {
            if found.get(url).is_none_or(|now| now.who != told.who)
                && let Err(error) = router.remove_worker(url)
            {
                tracing::debug!("{source}: {error}");
            }
        }
        for (url, told) in found {
            match before.get(&url).filter(|was| was.who == told.who) {
                Some(was) => {
                    if was.ready != told.ready {
                        router.withhold(&url, !told.ready);
                    }
                    self.ours.insert(url, told);
                }
                None if !told.ready => {}
                None => match router.add_worker(WorkerAddress::trusted(url.clone())) {
                    Ok(_) => {
                        tracing::info!("{source}: worker {url} added");
                        self.ours.insert(url, told);
                    }
                    Err(error) => tracing::debug!("{source}: {error}"),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> WorkerUrl {
        text.parse().expect("a URL")
    }

    fn found(pairs: &[(&str, &str)]) -> Found {
        let told = |who: &str| Told { who: who.to_owned(), ready: true };
        pairs.iter().map(|(address, who)| (url(address), told(who))).collect()
    }

    fn ids(router: &Router) -> Vec<(String, u32)> {
        router.registry.views().into_iter().map(|view| (view.url, view.id)).collect()
    }

    #[tokio::test]
    async fn the_set_follows_the_source_and_leaves_the_workers_of_others_alone() {
        let config = Config { worker_urls: vec![url("http://own:1")], ..Config::default() };
        let router = Router::new(config).expect("a good config");
        let mut following = Following::new(&router, "test");
        let own = ("http://own:1".to_owned(), 0);
        following.update(found(&[("http://a:1", "x"), ("http://own:1", "x"), ("http://b:1", "y")]));
        let (a, b) = (("http://a:1".to_owned(), 1), ("http://b:1".to_owned(), 2));
        assert_eq!(ids(&router), [own.clone(), a.clone(), b.clone()]);
        following.update(found(&[("http://b:1", "y"), ("http://a:1", "x")]));
        assert_eq!(ids(&router), [own.clone(), a, b.clone()], "nothing has changed");
        following.update(found(&[("http://a:1", "z"), ("http://b:1", "y")]));
        let again = ("http://a:1".to_owned(), 3);
        assert_eq!(ids(&router), [own.clone(), b, again], "another one at the same address");
        following.update(Found::new());
        assert_eq!(ids(&router), [own]);
    }

    #[tokio::test]
    async fn a_worker_that_is_not_ready_for_a_while_stays_with_all_that_was_learned() {
        let router = Router::new(Config::default()).expect("a good config");
        let mut following = Following::new(&router, "test");
        let away = |who: &str| {
            let told = Told { who: who.to_owned(), ready: false };
            Found::from([(url("http://a:1"), told)])
        };
        following.update(away("x"));
        assert!(ids(&router).is_empty(), "it has never been ready");
        following.update(found(&[("http://a:1", "x")]));
        following.update(away("x"));
        let worker = router.find(&url("http://a:1")).expect("it is still there");
        assert!(worker.is_withheld());
        following.update(found(&[("http://a:1", "x")]));
        let same = router.find(&url("http://a:1")).expect("there");
        assert!(Arc::ptr_eq(&worker, &same) && !same.is_withheld());
        following.update(away("y"));
        assert!(ids(&router).is_empty(), "another one, and not ready");
    }

    #[tokio::test]
    async fn who_removes_a_worker_by_hand_has_the_last_word() {
        let router = Router::new(Config::default()).expect("a good config");
        let mut following = Following::new(&router, "test");
        following.update(found(&[("http://a:1", "x")]));
        router.remove_worker(&url("http://a:1")).expect("there");
        following.update(found(&[("http://a:1", "x"), ("http://b:1", "x")]));
        assert_eq!(ids(&router), [("http://b:1".to_owned(), 1)]);
        following.update(Found::new());
        following.update(found(&[("http://a:1", "x")]));
        assert_eq!(ids(&router), [("http://a:1".to_owned(), 2)]);
    }
}
