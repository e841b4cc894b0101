//! Applies the worker sets of one source to the router.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

use crate::{fleet::WorkerSpec, names::WorkerUrl, router::Router};

/// The workers of a source.
pub(super) type WorkerSet = BTreeMap<WorkerUrl, Listed>;

/// A worker in its source.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Listed {
    pub(super) spec: WorkerSpec,
    /// Identity of the process behind the URL, such as the uid of a pod: another pod may get the same address
    /// later. Empty if the source has no identities.
    pub(super) instance: String,
    /// Whether the worker should get requests. A worker that is not ready stays registered with its learned state.
    pub(super) ready: bool,
}

impl Listed {
    /// Whether both are the same process with the same description. Their readiness may differ.
    fn is_same(&self, other: &Self) -> bool {
        self.instance == other.instance && self.spec == other.spec
    }
}

/// Adds and removes the workers of one source, and leaves all other workers as they are. A worker of the source that
/// an operator has removed is added again only after it has left the source and come back.
pub(super) struct Follower {
    router: Weak<Router>,
    source: &'static str,
    shared: Arc<Mutex<SharedSets>>,
}

/// What the followers of a router share: a worker in several sources stays until it has left all of them.
#[derive(Default)]
pub(super) struct SharedSets {
    /// The present set of each source.
    sets: BTreeMap<&'static str, WorkerSet>,
    /// The workers that were added, each with the source that it follows.
    added: BTreeMap<WorkerUrl, (&'static str, Listed)>,
}

impl Follower {
    pub(super) fn new(
        router: &Arc<Router>,
        source: &'static str,
        shared: Arc<Mutex<SharedSets>>,
    ) -> Self {
        Self { router: Arc::downgrade(router), source, shared }
    }

    /// Applies the present set of the source. A worker that has left all sets finishes its requests.
    pub(super) fn update(&self, found: WorkerSet) {
        let Some(router) = self.router.upgrade() else {
            return;
        };
        let mut shared = self.shared.lock();
        let before = shared.sets.insert(self.source, found.clone()).unwrap_or_default();
        for url in before.keys().filter(|url| !found.contains_key(url)) {
            shared.leave(&router, self.source, url);
        }
        for (url, now) in found {
            shared.list(&router, self.source, url, now);
        }
    }
}

impl SharedSets {
    /// Removes a worker that has left the set of the source that it follows, unless it can follow another source.
    fn leave(&mut self, router: &Arc<Router>, source: &'static str, url: &WorkerUrl) {
        let Some((_, was)) = self.added.get(url).filter(|(followed, _)| *followed == source) else {
            return;
        };
        let mut others = self.sets.iter().filter_map(|(other, set)| Some((*other, set.get(url)?)));
        let next = others.find(|(_, now)| now.ready).map(|(other, now)| (other, now.clone()));
        match next {
            Some((other, now)) if now.spec == was.spec => {
                if !was.ready {
                    router.withhold(url, false);
                }
                self.added.insert(url.clone(), (other, now));
            }
            next => {
                self.remove(router, source, url);
                if let Some((other, now)) = next {
                    self.list(router, other, url.clone(), now);
                }
            }
        }
    }

    /// Applies the present description of a worker in the set of `source`.
    fn list(&mut self, router: &Arc<Router>, source: &'static str, url: WorkerUrl, now: Listed) {
        if let Some((followed, was)) = self.added.get_mut(&url) {
            if *followed != source {
                return;
            }
            if now.is_same(was) {
                if was.ready != now.ready {
                    router.withhold(&url, !now.ready);
                }
                *was = now;
                return;
            }
            self.remove(router, source, &url);
        }
        if now.ready {
            match router.add_worker(now.spec.clone()) {
                Ok(_) => {
                    tracing::info!("{source}: worker {url} added");
                    self.added.insert(url, (source, now));
                }
                Err(error) => tracing::debug!("{source}: {error}"),
            }
        }
    }

    fn remove(&mut self, router: &Router, source: &'static str, url: &WorkerUrl) {
        self.added.remove(url);
        if let Err(error) = router.remove_worker(url) {
            tracing::debug!("{source}: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn url(text: &str) -> WorkerUrl {
        text.parse().expect("a URL")
    }

    fn listed(address: &str, instance: &str, ready: bool) -> (WorkerUrl, Listed) {
        let spec = WorkerSpec::from(url(address));
        (spec.url.clone(), Listed { spec, instance: instance.to_owned(), ready })
    }

    fn found(pairs: &[(&str, &str)]) -> WorkerSet {
        pairs.iter().map(|(address, instance)| listed(address, instance, true)).collect()
    }

    fn ids(router: &Router) -> Vec<(String, u32)> {
        router.registry.views().into_iter().map(|view| (view.url, view.id)).collect()
    }

    #[tokio::test]
    async fn the_set_follows_the_source_and_keeps_other_workers() {
        let config = Config { worker_urls: vec![url("http://own:1")], ..Config::default() };
        let router = Router::new(config).expect("a good config");
        let follower = Follower::new(&router, "test", Arc::default());
        let own = ("http://own:1".to_owned(), 0);
        follower.update(found(&[("http://a:1", "x"), ("http://own:1", "x"), ("http://b:1", "y")]));
        let (a, b) = (("http://a:1".to_owned(), 1), ("http://b:1".to_owned(), 2));
        assert_eq!(ids(&router), [own.clone(), a.clone(), b.clone()]);
        follower.update(found(&[("http://b:1", "y"), ("http://a:1", "x")]));
        assert_eq!(ids(&router), [own.clone(), a, b.clone()], "nothing has changed");
        follower.update(found(&[("http://a:1", "z"), ("http://b:1", "y")]));
        let again = ("http://a:1".to_owned(), 3);
        assert_eq!(ids(&router), [own.clone(), b, again], "another instance at the same address");
        follower.update(WorkerSet::new());
        assert_eq!(ids(&router), [own]);
    }

    #[tokio::test]
    async fn a_worker_that_is_not_ready_stays_registered_with_its_learned_state() {
        let router = Router::new(Config::default()).expect("a good config");
        let follower = Follower::new(&router, "test", Arc::default());
        let away = |instance: &str| WorkerSet::from([listed("http://a:1", instance, false)]);
        follower.update(away("x"));
        assert!(ids(&router).is_empty(), "it has never been ready");
        follower.update(found(&[("http://a:1", "x")]));
        follower.update(away("x"));
        let worker = router.find(&url("http://a:1")).expect("it is still there");
        assert!(!worker.is_in_rotation());
        let reason = worker.last_failure().expect("it gets no requests").reason;
        assert_eq!(reason, "its discovery source reports it as not ready");
        follower.update(found(&[("http://a:1", "x")]));
        let same = router.find(&url("http://a:1")).expect("there");
        assert!(Arc::ptr_eq(&worker, &same) && !same.is_withheld());
        follower.update(away("y"));
        assert!(ids(&router).is_empty(), "another instance, and not ready");
    }

    #[tokio::test]
    async fn a_worker_in_several_sources_stays_until_it_has_left_all() {
        let router = Router::new(Config::default()).expect("a good config");
        let shared = Arc::<Mutex<SharedSets>>::default();
        let [file, pods] =
            ["file", "pods"].map(|source| Follower::new(&router, source, Arc::clone(&shared)));
        let a = || ("http://a:1".to_owned(), 0);
        file.update(found(&[("http://a:1", "")]));
        pods.update(found(&[("http://a:1", "x")]));
        file.update(WorkerSet::new());
        assert_eq!(ids(&router), [a()], "the same worker");
        // Now it follows the pods.
        file.update(found(&[("http://a:1", "")]));
        pods.update(WorkerSet::from([listed("http://a:1", "x", false)]));
        let worker = router.find(&url("http://a:1")).expect("there");
        assert!(worker.is_withheld());
        pods.update(WorkerSet::new());
        assert!(!worker.is_withheld(), "the file has it");
        assert_eq!(ids(&router), [a()]);
        pods.update(WorkerSet::from([listed("http://a:1", "y", false)]));
        file.update(WorkerSet::new());
        assert!(ids(&router).is_empty(), "the pod is not ready");
        pods.update(found(&[("http://a:1", "y")]));
        let (_, mut keyed) = listed("http://a:1", "", true);
        keyed.spec.api_key = Some("key".parse().expect("a key"));
        file.update(WorkerSet::from([(url("http://a:1"), keyed)]));
        pods.update(WorkerSet::new());
        assert_eq!(
            ids(&router),
            [("http://a:1".to_owned(), 2)],
            "with another key it is added anew"
        );
    }

    #[tokio::test]
    async fn a_worker_removed_by_hand_stays_removed() {
        let router = Router::new(Config::default()).expect("a good config");
        let follower = Follower::new(&router, "test", Arc::default());
        follower.update(found(&[("http://a:1", "x")]));
        router.remove_worker(&url("http://a:1")).expect("there");
        follower.update(found(&[("http://a:1", "x"), ("http://b:1", "x")]));
        assert_eq!(ids(&router), [("http://b:1".to_owned(), 1)]);
        follower.update(WorkerSet::new());
        follower.update(found(&[("http://a:1", "x")]));
        assert_eq!(ids(&router), [("http://a:1".to_owned(), 2)]);
    }
}
