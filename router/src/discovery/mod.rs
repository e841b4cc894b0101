//! Discovery: sources that list the workers at run time, besides the command line and the admin routes.
//!
//! To add a source: a file here with an implementation of [`Discovery`], and a line in [`Sources::prepare`].

mod file;
mod follower;
#[cfg(feature = "kubernetes")]
mod kubernetes;

use std::{pin::Pin, sync::Arc};

use tokio::task::JoinSet;

use crate::{config::Config, error::StartError, router::Router};
use follower::Follower;

/// A source of workers.
trait Discovery: Send {
    /// The name of the source in log lines.
    fn name(&self) -> &'static str;

    /// Follows the source, and passes each new set of workers to `follower`. Never ends.
    fn follow(self: Box<Self>, follower: Follower) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// The sources of the config.
pub(crate) struct Sources(Vec<Box<dyn Discovery>>);

impl Sources {
    /// Checks the sources, as far as possible before the router runs. Fails if a source cannot be used.
    #[cfg_attr(
        not(feature = "kubernetes"),
        expect(clippy::unused_async, reason = "the look-up of a cluster is asynchronous")
    )]
    pub(crate) async fn prepare(config: &Config) -> Result<Self, StartError> {
        #[cfg(not(feature = "kubernetes"))]
        if config.service_discovery {
            let why = "this build has no Kubernetes; build it with the feature `kubernetes`";
            return Err(StartError::Discovery(format!("--service-discovery: {why}")));
        }
        let mut sources: Vec<Box<dyn Discovery>> = Vec::new();
        if let Some(path) = &config.worker_urls_file {
            sources.push(Box::new(file::UrlsFile::new(path.clone())));
        }
        #[cfg(feature = "kubernetes")]
        if config.service_discovery {
            sources.push(Box::new(kubernetes::Pods::prepare(config).await?));
        }
        Ok(Self(sources))
    }

    /// Starts a task for each source. The tasks end when the set is dropped.
    pub(crate) fn follow(self, router: &Arc<Router>) -> JoinSet<()> {
        let (mut tasks, shared) = (JoinSet::new(), Arc::default());
        for source in self.0 {
            let follower = Follower::new(router, source.name(), Arc::clone(&shared));
            tasks.spawn(source.follow(follower));
        }
        tasks
    }
}
